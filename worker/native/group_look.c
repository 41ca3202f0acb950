/* Looks at what passes between ranks: finite or not, and how large. Python is called for what is not finite only. */

#include "group_look.h"

#include "objects.h"
#include "reductions.h"

/* Whether it is a tensor that can be looked at here. */
static int is_readable(const GroupWriter *self, PyObject *tensor, TensorView *view)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    return (type == self->tensor || type == self->parameter) && self->exchange != NULL &&
           view_of(self->exchange, tensor, view) && is_plain(view);
}

static void add_to(Look *look, const TensorView *view)
{
    int64_t low, high;
    reduce_extremes(view->address, (size_t)view->count, view->dl.dtype.bits / 8, &low, &high);
    if (high >= inf_bits[view->dtype])
        look->high = NOT_FINITE;
    else if (look->high == NOT_LOOKED || (look->high != NOT_FINITE && look->dtype == view->dtype && look->high < high)) {
        look->high = high;
        look->dtype = view->dtype;
    }
}

void look_at(const GroupWriter *self, PyObject *tensors, Look *look)
{
    TensorView view;
    if (!PyList_CheckExact(tensors)) {
        if (is_readable(self, tensors, &view))
            add_to(look, &view);
        return;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++)
        look_at(self, PyList_GET_ITEM(tensors, i), look);
}

static int add_place(PyObject *found, PyObject *tensor, const TensorView *view)
{
    PyObject *ref = PyWeakref_NewRef(tensor, NULL), *address = PyLong_FromVoidPtr(view->address);
    const int done = ref != NULL && address != NULL && PyList_Append(found, ref) == 0 && PyList_Append(found, address) == 0;
    Py_XDECREF(ref);
    Py_XDECREF(address);
    return done ? 0 : -1;
}

static int add_places(const GroupWriter *self, PyObject *tensors, PyObject *found)
{
    TensorView view;
    if (!PyList_CheckExact(tensors))
        return is_readable(self, tensors, &view) ? add_place(found, tensors, &view) : 0;
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
static PyObject *tensor_at(const GroupWriter *self, PyObject *places, Py_ssize_t position, TensorView *view)
{
    PyObject *tensor = object_of(PyList_GET_ITEM(places, position));
    const int is_there = tensor != NULL && is_readable(self, tensor, view) &&
                         view->address == PyLong_AsVoidPtr(PyList_GET_ITEM(places, position + 1));
    if (!is_there)
        Py_CLEAR(tensor);
    return tensor;
}

/* All of them in a new list. NULL with an exception set. */
static PyObject *tensors_at(const GroupWriter *self, PyObject *places)
{
    TensorView view;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i + 1 < PyList_GET_SIZE(places); i += 2) {
        PyObject *tensor = tensor_at(self, places, i, &view);
        if (tensor != NULL && PyList_Append(found, tensor) < 0)
            Py_CLEAR(found);
        Py_XDECREF(tensor);
    }
    return found;
}

int look_at_outputs(GroupWriter *self, const Place *place)
{
    TensorView view;
    Look look = {NOT_LOOKED, 0};
    if (place->outputs == NULL || self->passed == NULL)
        return 0;
    for (Py_ssize_t i = 0; i + 1 < PyList_GET_SIZE(place->outputs); i += 2) {
        PyObject *tensor = tensor_at(self, place->outputs, i, &view);
        if (tensor != NULL)
            add_to(&look, &view);
        Py_XDECREF(tensor);
    }
    PyObject *tensors = look.high == NOT_FINITE ? tensors_at(self, place->outputs) : NULL;
    if (tensors == NULL)
        return PyErr_Occurred() ? -1 : 0;
    const int done = tell_passed(self, place, 1, tensors);
    Py_DECREF(tensors);
    return done;
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
