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

static void look_at_one(const GroupWriter *self, PyObject *tensor, int is_checked, Look *look)
{
    TensorView view;
    int64_t low, high;
    if (!is_readable(self, tensor, &view) || (is_checked && is_in_storage(tensor, &view) != 1))
        return;
    reduce_extremes(view.address, (size_t)view.count, view.dl.dtype.bits / 8, &low, &high);
    if (high >= inf_bits[view.dtype])
        look->high = NOT_FINITE;
    else if (look->high != NOT_FINITE && (look->high == NOT_LOOKED || (look->dtype == view.dtype && look->high < high))) {
        look->high = high;
        look->dtype = view.dtype;
    }
}

void look_at(const GroupWriter *self, PyObject *tensors, int is_checked, Look *look)
{
    if (!PyList_CheckExact(tensors)) {
        look_at_one(self, tensors, is_checked, look);
        return;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
        PyObject *item = Py_NewRef(PyList_GET_ITEM(tensors, i)); /* held: Python may run in between */
        look_at(self, item, is_checked, look);
        Py_DECREF(item);
    }
}

static int add_refs(const GroupWriter *self, PyObject *tensors, PyObject *found)
{
    TensorView view;
    if (PyList_CheckExact(tensors)) {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++)
            if (add_refs(self, PyList_GET_ITEM(tensors, i), found) < 0)
                return -1;
        return 0;
    }
    if (!is_readable(self, tensors, &view))
        return 0;
    PyObject *ref = PyWeakref_NewRef(tensors, NULL);
    const int done = ref != NULL ? PyList_Append(found, ref) : -1;
    Py_XDECREF(ref);
    return done;
}

PyObject *refs_to(const GroupWriter *self, PyObject *tensors)
{
    PyObject *found = PyList_New(0);
    if (found != NULL && (add_refs(self, tensors, found) < 0 || PyList_GET_SIZE(found) == 0))
        Py_CLEAR(found);
    return found;
}

int look_at_outputs(GroupWriter *self, const Place *place)
{
    if (place->outputs == NULL || self->passed == NULL)
        return 0;
    PyObject *alive = PyList_New(0);
    for (Py_ssize_t i = 0; alive != NULL && i < PyList_GET_SIZE(place->outputs); i++) {
        PyObject *tensor = object_of(PyList_GET_ITEM(place->outputs, i));
        if (tensor != NULL && PyList_Append(alive, tensor) < 0)
            Py_CLEAR(alive);
        Py_XDECREF(tensor);
    }
    if (alive == NULL)
        return -1;
    Look look = {NOT_LOOKED, 0};
    look_at(self, alive, 1, &look);
    const int done = look.high == NOT_FINITE ? tell_passed(self, place, 1, alive) : 0;
    Py_DECREF(alive);
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
