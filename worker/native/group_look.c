/* Reads the tensors that pass between ranks: finite or not, and how large. Calls Python only if one is not finite.

   Items of the script's lists are borrowed: reading one runs no Python and keeps the GIL (`largest_of`), so no other
   thread changes the list meanwhile. Outputs are kept as weak references until the wait: they may be large, and a script that
   drops them wants their memory. */

#include "group_look.h"

#include "objects.h"
#include "reductions.h"

typedef enum { NOWHERE, HERE, LATE } Looked;

/* Who reads a tensor: this file, `late`, or nobody. */
static Looked looked_at(const GroupWriter *self, PyObject *tensor, TensorView *view)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    const Looked otherwise = self->late != NULL && self->late != Py_None ? LATE : NOWHERE;
    if (type != self->tensor && type != self->parameter)
        return NOWHERE;
    view->address = NULL;
    if (self->exchange == NULL) /* a torch that does not show its tensors to C */
        return otherwise;
    if (!view_of(self->exchange, tensor, view))
        return NOWHERE;
    if (view->is_host && !self->is_host_late)
        return is_plain(view) ? HERE : NOWHERE;
    return view->dtype < FLOATS_END ? otherwise : NOWHERE;
}

static void add_to(Look *look, const TensorView *view)
{
    const int64_t high = largest_of(view);
    if (high >= inf_bits[view->dtype])
        look->high = NOT_FINITE;
    else if (look->high == NOT_LOOKED || (look->high != NOT_FINITE && look->dtype == view->dtype && look->high < high)) {
        look->high = high;
        look->dtype = view->dtype;
    }
}

int look_at(const GroupWriter *self, PyObject *tensors, Look *look)
{
    TensorView view;
    int some_late = 0;
    if (!PyList_CheckExact(tensors)) {
        const Looked looked = looked_at(self, tensors, &view);
        if (looked == HERE)
            add_to(look, &view);
        return looked == LATE;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++)
        some_late |= look_at(self, PyList_GET_ITEM(tensors, i), look);
    return some_late;
}

static int add_place(PyObject *found, PyObject *tensor, const TensorView *view)
{
    PyObject *ref = PyWeakref_NewRef(tensor, NULL), *address = PyLong_FromVoidPtr(view->address);
    /* the address, too: a tensor whose storage was freed or replaced meanwhile is not read */
    const int done = ref != NULL && address != NULL && PyList_Append(found, ref) == 0 && PyList_Append(found, address) == 0;
    Py_XDECREF(ref);
    Py_XDECREF(address);
    return done ? 0 : -1;
}

static int add_places(const GroupWriter *self, PyObject *tensors, PyObject *found)
{
    TensorView view;
    if (!PyList_CheckExact(tensors))
        return looked_at(self, tensors, &view) != NOWHERE ? add_place(found, tensors, &view) : 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++)
        if (add_places(self, PyList_GET_ITEM(tensors, i), found) < 0)
            return -1;
    return 0;
}

PyObject *places_of(const GroupWriter *self, PyObject *tensors)
{
    PyObject *found = PyList_New(0);
    if (found != NULL && (add_places(self, tensors, found) < 0 || PyList_GET_SIZE(found) == 0))
        Py_CLEAR(found);
    return found;
}

/* The tensor at a position of what places_of has returned, if it is alive, with its memory where it was: a storage may be
   freed under its tensors. NULL if not. */
static PyObject *tensor_at(const GroupWriter *self, PyObject *places, Py_ssize_t position, TensorView *view, Looked *looked)
{
    PyObject *tensor = object_of(PyList_GET_ITEM(places, position));
    *looked = tensor != NULL ? looked_at(self, tensor, view) : NOWHERE;
    if (*looked == NOWHERE || view->address != PyLong_AsVoidPtr(PyList_GET_ITEM(places, position + 1)))
        Py_CLEAR(tensor);
    return tensor;
}

/* A new list of the tensors whose reader is `which`. Those that are read here are added to `look`, unless it is NULL.
   NULL with an exception set. */
static PyObject *tensors_at(const GroupWriter *self, PyObject *places, Looked which, Look *look)
{
    TensorView view;
    Looked looked;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i + 1 < PyList_GET_SIZE(places); i += 2) {
        PyObject *tensor = tensor_at(self, places, i, &view, &looked);
        if (tensor != NULL && looked == HERE && look != NULL)
            add_to(look, &view);
        if (tensor != NULL && looked == which && PyList_Append(found, tensor) < 0)
            Py_CLEAR(found);
        Py_XDECREF(tensor);
    }
    return found;
}

int look_at_outputs(GroupWriter *self, Place *place)
{
    Look look = {NOT_LOOKED, 0};
    if (place->outputs == NULL || self->passed == NULL)
        return 0;
    PyObject *late = tensors_at(self, place->outputs, LATE, &look);
    int done = late == NULL ? -1 : PyList_GET_SIZE(late) > 0 ? look_late(self, place, CAME_OUT, late) : 0;
    Py_XDECREF(late);
    if (done == 0 && look.high == NOT_FINITE) {
        PyObject *tensors = tensors_at(self, place->outputs, HERE, NULL);
        done = tensors != NULL ? tell_passed(self, place, 1, tensors) : -1;
        Py_XDECREF(tensors);
    }
    return done;
}

int look_at_issued(GroupWriter *self, Place *place)
{
    if (place->outputs == NULL)
        return 0;
    PyObject *late = tensors_at(self, place->outputs, LATE, NULL);
    const int done = late == NULL ? -1 : PyList_GET_SIZE(late) > 0 ? look_late(self, place, IS_ISSUED, late) : 0;
    Py_XDECREF(late);
    return done;
}

int look_late(GroupWriter *self, Place *place, int when, PyObject *tensors)
{
    /* `late` is Python, and gets a list that holds the tensors. What it returns is kept in the place, and given to it again. */
    if (self->late == NULL || self->slots[place->slot].holders != place->holders) /* another group holds its slot by now */
        return 0;
    PyObject *given = place->given_late != NULL ? place->given_late : Py_None;
    PyObject *found = PyObject_CallFunction(self->late, "iLLLLiOO", place->slot, (long long)place->number,
                                            (long long)place->operation, (long long)place->root, (long long)place->message,
                                            when, given, tensors);
    if (found == NULL)
        return -1;
    if (when == GOES_IN && found != Py_None)
        Py_XSETREF(place->given_late, Py_NewRef(found));
    Py_DECREF(found);
    return 0;
}

int tell_passed(GroupWriter *self, const Place *place, int came_out, PyObject *tensors)
{
    if (self->slots[place->slot].holders != place->holders) /* another group holds its slot by now */
        return 0;
    PyObject *done = PyObject_CallFunction(
        self->passed, "iLLLLiLLO", place->slot, (long long)place->number, (long long)place->operation,
        (long long)place->root, (long long)place->message, came_out, (long long)place->given.high,
        (long long)place->given.dtype, tensors);
    Py_XDECREF(done);
    return done != NULL ? 0 : -1;
}
