/* The rows of one frame: leaf, weight and gradient of RowWriter (worker/record/rows.py) for ordinary tensors. */

#include "rows.h"

#include <string.h>

#include "objects.h"
#include "recent_shapes.h"

void clear_frame(Frame *frame)
{
    for (int i = 0; i < frame->used; i++) {
        Row *row = &frame->rows[i];
        Py_CLEAR(row->role);
        Py_CLEAR(row->object);
        Py_CLEAR(row->key);
        Py_CLEAR(row->seen);
        Py_CLEAR(row->place);
        Py_CLEAR(row->known);
    }
    frame->used = 0;
}

/* Whether it was made in inference mode: it counts no changes. */
static int is_inference(PyObject *tensor)
{
    return is_answer(PyObject_CallMethodNoArgs(tensor, s_is_inference), Py_True);
}

int version_of(FrameWriter *self, PyObject *tensor, int64_t *version)
{
    /* torch raises for the version of such a tensor, which takes 20 us. To ask before takes 60 ns, which only a process that has
       met one pays. */
    static int has_met;
    *version = NO_VERSION;
    if (has_met && is_inference(tensor))
        return 1;
    /* A descriptor in C (PyGetSetDescrObject) is a function and its closure, which the constructor has looked up once. */
    PyObject *found = self->version->d_getset->get(tensor, self->version->d_getset->closure);
    if (found == NULL) { /* RuntimeError: inference tensors do not track version counter */
        drop_error();
        return has_met = is_inference(tensor);
    }
    const int good = integer_from(found, version);
    Py_DECREF(found);
    return good;
}

/* -- gather ----------------------------------------------------------------------------------------------------- */

static Row *next_row(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *role)
{
    if (frame->used == MOST_ROWS)
        return NULL;
    PyObject *slot = find(slots, role);
    if (slot == NULL || (PyDict_GET_SIZE(self->ignored) && find(self->ignored, slot) != NULL))
        return NULL;
    const long long number = PyLong_AsLongLong(slot);
    if (number < 0 || number >= NOTHING) {
        drop_error();
        return NULL;
    }
    Row *row = &frame->rows[frame->used++];
    memset(row, 0, sizeof *row);
    row->slot = (uint32_t)number;
    row->same = NO_ROW;
    return row;
}

/* Where the tensor is, what type and shape. */
static int place_of(FrameWriter *self, Row *row)
{
    if (!view_of(self->exchange, row->object, &row->view) || !shape_of(self, &row->view, &row->shape))
        return 0;
    row->dtype = row->view.dtype;
    return 1;
}

/* Whether a device's reader reads it: 1 or 0, or -1 if the tensor is left to Python. */
static int is_for_device(FrameWriter *self, const Row *row)
{
    if (row->view.is_host && self->reads_host)
        return is_plain(&row->view) || is_plain_integer(&row->view) ? 0 : -1;
    return self->device_frame != NULL ? 1 : -1;
}

static int is_empty(const DLTensor *tensor)
{
    for (int i = 0; i < tensor->ndim; i++)
        if (tensor->shape[i] == 0)
            return 1;
    return 0;
}

/* Plan to read its numbers, if it has memory. 0 if the tensor is left to Python. */
static int plan_to_read(FrameWriter *self, Row *row)
{
    if (is_empty(&row->view.dl)) {
        row->is_new = 1;
        row->kind = KIND_EMPTY;
        row->value = NOTHING;
        return 1;
    }
    row->on_device = is_for_device(self, row);
    if (row->on_device) {
        row->is_new = 1;
        return row->on_device > 0;
    }
    const int in_storage = is_in_storage(row->object, &row->view);
    row->is_new = 1;
    row->to_read = row->has_value = in_storage == 1;
    row->kind = in_storage == 1 ? KIND_MEASURED : KIND_NOT_MEASURABLE;
    if (in_storage != 1)
        row->value = NOTHING;
    return in_storage >= 0;
}

/* The memory of a tensor: (ref, version, value, shape, dtype, kind, flags, high, meta, address on a device or 0) */
static int is_memory(PyObject *seen)
{
    return PyTuple_CheckExact(seen) && PyTuple_GET_SIZE(seen) == 10;
}

static int is_memory_of(PyObject *seen, const Row *row)
{
    return seen != NULL && is_memory(seen) && is_ref_to(PyTuple_GET_ITEM(seen, 0), row->object) &&
           row->version >= 0 && item(seen, 1) == row->version;
}

/* Whether a tensor on a device has other memory than when it was seen, as after `x.data = ...`: that leaves its version. */
static int has_moved(FrameWriter *self, PyObject *seen, Row *row)
{
    const int64_t address = item(seen, 9);
    return address != 0 && view_of(self->exchange, row->object, &row->view) && row->view.address != NULL &&
           (int64_t)(intptr_t)row->view.address != address;
}

/* Whether the tensor that was seen is alive and lies at an address still. It may have left it to another: see has_moved. */
static int is_still_at(FrameWriter *self, PyObject *seen, const void *address)
{
    TensorView view;
    PyObject *tensor = object_of(PyTuple_GET_ITEM(seen, 0)); /* held: torch's function is called with it */
    const int found = tensor != NULL && view_of(self->exchange, tensor, &view) && view.address == address;
    Py_XDECREF(tensor);
    return found;
}

static int from_memory(PyObject *seen, Row *row)
{
    if (item(seen, 6) != 0)
        return 0;
    row->value = item(seen, 2);
    row->shape = (uint32_t)item(seen, 3);
    row->dtype = (uint8_t)item(seen, 4);
    row->kind = (uint8_t)item(seen, 5);
    return !PyErr_Occurred();
}

/* The tensor of an input or an output */
static int tensor_row(FrameWriter *self, Frame *frame, Row *row, PyObject *tensor)
{
    row->object = Py_NewRef(tensor);
    if (!version_of(self, tensor, &row->version))
        return 0;
    /* `seen` has the tensors of earlier frames only: within a frame one may come twice, as input and as output */
    for (int i = 0; i < frame->used - 1; i++) {
        const Row *other = &frame->rows[i];
        if (other->object == tensor && row->version >= 0 && other->version == row->version) {
            row->same = i;
            row->shape = other->shape;
            return 1;
        }
    }
    row->key = PyLong_FromVoidPtr(tensor);
    if (row->key == NULL)
        return 0;
    PyObject *seen = find(self->seen, row->key);
    if (is_memory_of(seen, row) && !has_moved(self, seen, row))
        return from_memory(seen, row);
    /* asked before place_of: that makes a tuple, for which gc may run, and `seen` is borrowed */
    const int is_changed = seen != NULL && is_memory(seen) && is_ref_to(PyTuple_GET_ITEM(seen, 0), tensor);
    if (!place_of(self, row))
        return 0;
    if (is_changed && is_for_device(self, row) == 1)
        return 0; /* changed: Python also records the numbers it had before */
    if ((PyObject *)Py_TYPE(tensor) == self->tensor && row->view.is_in_order && row->view.address != NULL &&
        row->dtype < FLOATS_END) {
        row->address = row->view.address; /* autograd and `view` make new tensors over the same elements */
        for (int i = 0; i < frame->used - 1; i++) {
            const Row *other = &frame->rows[i];
            if (other->is_new && other->address == row->address && other->view.count == row->view.count &&
                other->dtype == row->dtype && row->version >= 0 && other->version == row->version) {
                row->same = i;
                return 1;
            }
        }
        const int64_t place[] = {(int64_t)(intptr_t)row->address, row->view.count, row->dtype};
        row->place = with_integers(PyTuple_New(3), 0, place, 3);
        if (row->place == NULL)
            return 0;
        seen = find(self->by_memory, row->place);
        if (seen != NULL && is_memory(seen) && row->version >= 0 && item(seen, 1) == row->version &&
            is_still_at(self, seen, row->address)) {
            const uint32_t shape = row->shape;
            const int good = from_memory(seen, row);
            row->shape = shape;
            return good;
        }
    }
    return plan_to_read(self, row);
}

/* An object that is not a tensor and holds none */
static int is_scalar(PyObject *leaf)
{
    return PyBool_Check(leaf) || PyLong_CheckExact(leaf) || PyFloat_CheckExact(leaf) || PyUnicode_CheckExact(leaf);
}

/* The row of a leaf */
static int closed_row(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *role, PyObject *leaf, int is_output)
{
    PyObject *cls = (PyObject *)Py_TYPE(leaf);
    if (cls != self->tensor && PyType_IsSubtype(Py_TYPE(leaf), (PyTypeObject *)self->tensor) && cls != self->parameter)
        return 0;
    Row *row = next_row(self, frame, slots, role);
    if (row == NULL)
        return 0;
    row->is_output = is_output;
    row->role = Py_NewRef(role);
    if (cls == self->tensor || cls == self->parameter)
        return tensor_row(self, frame, row, leaf);
    row->shape = NOTHING;
    row->value = NOTHING;
    row->kind = leaf == Py_None ? KIND_NONE : KIND_NOT_A_TENSOR;
    return 1;
}

/* The rows of the leaves of a list, a mapping, a dataclass or another container that Python can open */
static int open_rows(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *role, PyObject *value, int depth,
                     int is_output)
{
    /* leaves_of is Python, and asks containers of the script for their items: afterwards nothing borrowed is valid but what
       `found` and the arguments of the call hold. */
    PyObject *found = PyList_New(0), *level = PyLong_FromLong(depth), *done = NULL;
    if (found != NULL && level != NULL)
        done = PyObject_CallFunctionObjArgs(self->leaves_of, value, role, found, level, NULL);
    int good = done != NULL;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(found); i++) {
        PyObject *pair = PyList_GET_ITEM(found, i);
        good = PyTuple_CheckExact(pair) && PyTuple_GET_SIZE(pair) == 2 &&
               closed_row(self, frame, slots, PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1), is_output);
    }
    Py_XDECREF(found);
    Py_XDECREF(level);
    Py_XDECREF(done);
    return good;
}

int leaf_rows(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *role, PyObject *leaf, int depth, int is_output)
{
    if (leaf == Py_None || is_scalar(leaf) || PyType_IsSubtype(Py_TYPE(leaf), (PyTypeObject *)self->tensor))
        return closed_row(self, frame, slots, role, leaf, is_output);
    return open_rows(self, frame, slots, role, leaf, depth, is_output);
}

/* Use the numbers of a weight that were read since the last optimizer step; 0 if they are left to Python. */
static int from_known(FrameWriter *self, PyObject *known, Row *row)
{
    PyObject *stats = PyTuple_GET_ITEM(known, 3);
    row->known = Py_NewRef(known);
    if (is_for_device(self, row) == 1)
        return plan_to_read(self, row);
    if ((PyObject *)Py_TYPE(stats) != self->numbers)
        return 0;
    const int64_t kind = item(stats, 3);
    row->numbers = (Numbers){item(stats, 0), item(stats, 1), item(stats, 2)};
    row->kind = (uint8_t)kind;
    row->is_new = 1;
    row->has_value = kind == KIND_MEASURED;
    if (!row->has_value)
        row->value = NOTHING;
    return (kind == KIND_MEASURED || kind == KIND_NOT_MEASURABLE || kind == KIND_EMPTY) && (row->numbers.meta & 0xFF) == 0 &&
           !PyErr_Occurred();
}

int weight_row(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *name, PyObject *weight, int64_t step)
{
    Row *row = next_row(self, frame, slots, name);
    if (row == NULL || ((PyObject *)Py_TYPE(weight) != self->parameter && (PyObject *)Py_TYPE(weight) != self->tensor))
        return 0;
    row->is_weight = 1;
    row->object = Py_NewRef(weight);
    if (!version_of(self, weight, &row->version) || row->version < 0)
        return 0;
    row->key = PyLong_FromVoidPtr(weight);
    if (row->key == NULL)
        return 0;
    PyObject *seen = find(self->seen, row->key);
    if (is_memory_of(seen, row))
        return from_memory(seen, row);
    for (int i = 0; i < frame->used - 1; i++)
        if (frame->rows[i].object == weight)
            return 0; /* under two names in one module */
    if (!place_of(self, row))
        return 0;
    PyObject *known = find(self->weights, row->key);
    if (known != NULL && PyTuple_CheckExact(known) && PyTuple_GET_SIZE(known) == 4 &&
        is_ref_to(PyTuple_GET_ITEM(known, 0), weight) && item(known, 1) == row->version && item(known, 2) == step)
        return from_known(self, known, row);
    return plan_to_read(self, row);
}

int gradient_row(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *role, PyObject *gradient, int mark)
{
    Row *row = next_row(self, frame, slots, role);
    if (row == NULL)
        return 0;
    row->object = Py_NewRef(gradient);
    row->mark = (uint16_t)mark;
    if (!place_of(self, row) || !plan_to_read(self, row))
        return 0;
    row->is_output = 1; /* near overflow is looked for */
    return 1;
}

/* -- remember --------------------------------------------------------------------------------------------------- */

PyObject *known_of(const Row *row, PyObject *ref, int64_t step, PyObject *numbers)
{
    const int64_t when[] = {row->version, step};
    PyObject *known = numbers != NULL ? with_integers(PyTuple_New(4), 1, when, 2) : NULL;
    if (known == NULL) {
        Py_XDECREF(numbers);
        return NULL;
    }
    PyTuple_SET_ITEM(known, 0, Py_NewRef(ref));
    PyTuple_SET_ITEM(known, 3, numbers);
    return known;
}

PyObject *stats_of(PyTypeObject *type, const Numbers *numbers, int64_t kind)
{
    const int64_t fields[] = {numbers->low, numbers->high, numbers->meta, kind};
    return with_integers(type->tp_alloc(type, 4), 0, fields, 4);
}

/* See `is_memory`. NULL with an exception set. Takes over `ref`. */
static PyObject *memory_of(const Row *row, PyObject *ref)
{
    const int64_t address = row->on_device ? (int64_t)(intptr_t)row->address : 0;
    const int64_t numbers[] = {row->version, row->value, row->shape, row->dtype, row->kind,
                               0,            row->numbers.high, row->numbers.meta, address};
    PyObject *memory = with_integers(PyTuple_New(10), 1, numbers, 9);
    if (memory == NULL)
        Py_DECREF(ref);
    else
        PyTuple_SET_ITEM(memory, 0, ref);
    return memory;
}

int make_memories(FrameWriter *self, Frame *frame, int64_t step)
{
    for (int i = 0; i < frame->used; i++) {
        Row *row = &frame->rows[i];
        if (!row->is_new)
            continue;
        /* a weak reference: a table that kept activations alive would take the memory that the training needs */
        PyObject *ref = row->known != NULL ? Py_NewRef(PyTuple_GET_ITEM(row->known, 0))
                                           : PyWeakref_NewRef(row->object, NULL);
        if (ref == NULL)
            return 0;
        if (row->is_weight && row->known == NULL && !row->on_device) {
            PyObject *numbers = stats_of((PyTypeObject *)self->numbers, &row->numbers, row->kind);
            row->known = known_of(row, ref, step, numbers);
            row->is_known_new = 1;
            if (row->known == NULL) {
                Py_DECREF(ref);
                return 0;
            }
        }
        row->seen = memory_of(row, ref);
        if (row->seen == NULL)
            return 0;
    }
    return 1;
}

void remember(FrameWriter *self, Frame *frame)
{
    for (int i = 0; i < frame->used; i++) {
        Row *row = &frame->rows[i];
        if (row->seen == NULL)
            continue;
        if (PyDict_SetItem(self->seen, row->key, row->seen) < 0 ||
            (row->place != NULL && PyDict_SetItem(self->by_memory, row->place, row->seen) < 0) ||
            (row->is_known_new && PyDict_SetItem(self->weights, row->key, row->known) < 0))
            drop_error(); /* no memory: the tensor will be read again */
    }
}
