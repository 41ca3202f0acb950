/* The rows of tensors on a device: read by device_reads.c, or by worker/device/device_buffer.py. */

#include "device_rows.h"

#include "device_reads.h"
#include "frame_store.h"
#include "objects.h"
#include "writer_lock.h"

enum { CAPTURED = 1 << 30 }; /* as in worker/device/captured_rows.py: the graph that is captured reads it */

/* The index of a value in the page, or None if there is none; 0 with an exception set */
static int set_value(Row *row, PyObject *index)
{
    row->value = index == Py_None ? NOTHING : PyLong_AsLongLong(index);
    row->kind = row->value >= CAPTURED ? KIND_NOT_MEASURABLE : KIND_MEASURED;
    return !PyErr_Occurred();
}

/* The numbers of a weight that were returned before, or None. Borrowed. */
static PyObject *earlier_of(const Row *row)
{
    return row->known != NULL ? PyTuple_GET_ITEM(row->known, 3) : Py_None;
}

/* Make `known` of a weight, for its next frame, if there are other `numbers` than before; 0 with an exception set. */
static int know(Row *row, PyObject *numbers, int64_t step)
{
    PyObject *known = NULL;
    if (numbers == earlier_of(row))
        return 1;
    if (numbers != Py_None) {
        PyObject *ref = PyWeakref_NewRef(row->object, NULL);
        known = ref != NULL ? known_of(row, ref, step, Py_NewRef(numbers)) : NULL;
        Py_XDECREF(ref);
    }
    Py_XSETREF(row->known, known);
    row->is_known_new = known != NULL;
    return known != NULL || numbers == Py_None;
}

static int is_asked(const Row *row, int part)
{
    return row->on_device && part == (row->is_weight ? 1 + (row->known != NULL) : 0);
}

static void gather(Frame *frame, Asked *asked)
{
    asked->used = 0;
    for (int part = 0; part < 3; part++) {
        for (int i = 0; i < frame->used; i++) {
            Row *row = &frame->rows[i];
            if (!is_asked(row, part))
                continue;
            asked->elements[asked->used] = part < 2 ? elements_in_order(row->object, &row->view) : 0;
            asked->rows[asked->used++] = row;
        }
        if (part == 0)
            asked->values = asked->used;
        if (part == 1)
            asked->fresh = asked->used;
    }
}

/* Whether all of them are on one device, and nothing about them is for Python to find out. */
static int are_simple(const Asked *asked)
{
    const DLTensor *first = &asked->rows[0]->view.dl;
    for (int i = 0; i < asked->used; i++) {
        const DLTensor *tensor = &asked->rows[i]->view.dl;
        if ((i < asked->fresh && asked->elements[i] == 0) || tensor->device.type != first->device.type ||
            tensor->device.id != first->device.id)
            return 0;
    }
    return 1;
}

/* 1 if they are being read; 0, and nothing was done, if `device_frame` must be asked; -1 if it has failed. */
static int read_side_by_side(FrameWriter *self, const Asked *asked, const Frame *frame, int64_t step, int count)
{
    PyObject *numbers;
    if (self->device_rows == NULL || !are_simple(asked))
        return 0;
    const int64_t first = start_reads(self, asked, frame, count, &numbers);
    if (first < 0)
        return first == -1 ? 0 : -1;
    int good = PyList_Check(numbers) && PyList_GET_SIZE(numbers) == asked->fresh - asked->values;
    for (int i = 0; good && i < asked->used; i++) {
        asked->rows[i]->kind = KIND_MEASURED;
        asked->rows[i]->value = first + i;
        if (i >= asked->values && i < asked->fresh)
            good = know(asked->rows[i], PyList_GET_ITEM(numbers, i - asked->values), step);
    }
    Py_DECREF(numbers);
    return good ? 1 : -1;
}

/* Call `device_frame`: a new reference, or NULL with an exception set. */
static PyObject *read_any(FrameWriter *self, const Asked *asked, int count)
{
    PyObject *tensors = PyList_New(0), *elements = PyList_New(0), *earlier = PyList_New(0), *found = NULL;
    int good = tensors != NULL && elements != NULL && earlier != NULL;
    for (int i = 0; good && i < asked->used; i++)
        good = PyList_Append(tensors, asked->rows[i]->object) == 0 &&
               append(elements, PyLong_FromLongLong(asked->elements[i])) &&
               (i < asked->values || PyList_Append(earlier, earlier_of(asked->rows[i])) == 0);
    if (good)
        found = PyObject_CallFunctionObjArgs(self->device_frame, tensors, elements, earlier, count ? Py_True : Py_False,
                                             NULL);
    Py_XDECREF(tensors);
    Py_XDECREF(elements);
    Py_XDECREF(earlier);
    return found;
}

static int read_others(FrameWriter *self, const Asked *asked, int64_t step, int count)
{
    PyObject *indices, *numbers, *found = read_any(self, asked, count);
    int good = found != NULL && PyTuple_CheckExact(found) &&
               PyArg_ParseTuple(found, "O!O!", &PyList_Type, &indices, &PyList_Type, &numbers) &&
               PyList_GET_SIZE(indices) == asked->used && PyList_GET_SIZE(numbers) == asked->used - asked->values;
    for (int i = 0; good && i < asked->used; i++)
        good = set_value(asked->rows[i], PyList_GET_ITEM(indices, i)) &&
               (i < asked->values || know(asked->rows[i], PyList_GET_ITEM(numbers, i - asked->values), step));
    Py_XDECREF(found);
    return good;
}

int read_device_rows(FrameWriter *self, Frame *frame, int64_t step)
{
    Asked asked;
    const int count = frame->batch % COUNT_EVERY == 0;
    gather(frame, &asked);
    if (asked.used == 0)
        return 1;
    /* Python is called below, and writes into the recorder. The wait may release the GIL: `follow_segment` and
       `store_frame` find out what others wrote. An exception that is set goes through `leave_lock` to the caller's drop_error. */
    if (!take_lock(self->mutex, self->cell.buf))
        return 0;
    int done = read_side_by_side(self, &asked, frame, step, count);
    if (done == 0)
        done = read_others(self, &asked, step, count);
    leave_lock(self->mutex, self->cell.buf);
    return done > 0 && follow_segment(self, frame);
}
