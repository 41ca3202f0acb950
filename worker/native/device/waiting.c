/* What waits on a device, for the lists of a StreamBuffer (worker/device/stream_buffer.py): tensors for the next launch, and
   weights that were read before for the packing of the rows. A tensor that waits is held by its list, so its memory is not given to
   another one; its elements may change, which its version tells. */

#include "waiting.h"

#include "objects.h"

static int append_to(PyObject *object, PyObject *name, PyObject *item)
{
    PyObject *list = PyObject_GetAttr(object, name);
    const int good = list != NULL && PyList_Check(list) && append(list, Py_XNewRef(item));
    Py_XDECREF(list);
    return good;
}

/* The rows of weights begin at a position: they know their numbers when these are packed. 0 with an exception set. */
static int remember_at(const Reading *reading, int64_t position, PyObject *rows)
{
    PyObject *pair = with_integers(PyTuple_New(2), 0, &position, 1);
    if (pair == NULL)
        return 0;
    PyTuple_SET_ITEM(pair, 1, Py_NewRef(rows));
    const int good = append_to(reading->stream, s_remembered, pair);
    Py_DECREF(pair);
    return good;
}

/* A DeviceRow of worker/device/stream_buffer.py. NULL with an exception set. */
static PyObject *new_row(FrameWriter *self, const Reading *reading, const TensorView *view)
{
    const int64_t numbers[] = {(int64_t)(intptr_t)view->address, bytes_of(view)};
    PyObject *place = with_integers(PyTuple_New(2), 0, numbers, 2), *row = NULL;
    if (place != NULL)
        row = PyObject_CallFunctionObjArgs(self->device_row, reading->stream, place, NULL);
    Py_XDECREF(place);
    return row;
}

int have_wait(FrameWriter *self, const Reading *reading, PyObject *list, PyObject *items, int64_t first, PyObject *count)
{
    PyTypeObject *type = (PyTypeObject *)self->waiting;
    PyObject *waiting = with_integers(type->tp_alloc(type, 3), 1, &first, 1);
    if (waiting == NULL)
        return 0;
    PyTuple_SET_ITEM(waiting, 0, Py_NewRef(items));
    PyTuple_SET_ITEM(waiting, 2, Py_NewRef(count));
    const int good = append_to(reading->stream, list, waiting);
    Py_DECREF(waiting);
    return good;
}

/* Weights that were read before. 0 with an exception set. */
static int keep_known(FrameWriter *self, const Reading *reading, const Asked *asked, int64_t first, PyObject *count)
{
    PyObject *rows = PyList_New(0);
    int good = rows != NULL;
    for (int i = asked->fresh; good && i < asked->used; i++)
        good = append(rows, Py_NewRef(PyTuple_GET_ITEM(asked->rows[i]->known, 3)));
    good = good && have_wait(self, reading, s_weights, reading->known, first, count) && remember_at(reading, first, rows);
    Py_XDECREF(rows);
    return good;
}

PyObject *note_weights(FrameWriter *self, const Reading *reading, const Asked *asked, int64_t position, PyObject *count)
{
    PyObject *rows = PyList_New(0);
    int good = rows != NULL;
    for (int i = asked->values; good && i < asked->fresh; i++)
        good = append(rows, new_row(self, reading, &asked->rows[i]->view));
    if (good && asked->values < asked->fresh)
        good = remember_at(reading, position + asked->values, rows);
    if (good && asked->fresh < asked->used)
        good = keep_known(self, reading, asked, position + asked->fresh, count);
    if (!good)
        Py_CLEAR(rows);
    return rows;
}

int hold(FrameWriter *self, const Reading *reading, const Row *row, int64_t position)
{
    int64_t version;
    if (!version_of(self, row->object, &version))
        version = NO_VERSION;
    const int64_t numbers[] = {version, (int64_t)(intptr_t)row->view.address, position};
    PyObject *held = with_integers(PyTuple_New(4), 1, numbers, 3), *size = PyLong_FromLongLong(bytes_of(&row->view));
    if (held != NULL)
        PyTuple_SET_ITEM(held, 0, Py_NewRef(row->object));
    const int good = held != NULL && size != NULL && append_to(reading->stream, s_held, held) &&
                     was_done(PyObject_CallMethodObjArgs(reading->buffer, s_hold, size, NULL));
    Py_XDECREF(held);
    Py_XDECREF(size);
    return good;
}
