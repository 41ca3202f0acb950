/* Starts to read a frame's tensors on a device, for DeviceRows (worker/record/device_rows.py) and its DeviceStatsBuffer
   (worker/device/device_buffer.py). What is rare is left to their methods.

   The caller holds the recorder's mutex (writer_lock.c): the methods of Python that are called here write into the recorder, and
   another thread would find it half written. Exceptions go to the caller: the device may fail, and a handler may raise. */

#include "device_reads.h"

#include "frame_store.h"
#include "launches.h"
#include "objects.h"

enum { ASK_PYTHON = -1, HAS_FAILED = -2 };

static void clear_reading(Reading *reading)
{
    Py_CLEAR(reading->buffer);
    Py_CLEAR(reading->driver);
    Py_CLEAR(reading->stream);
    Py_CLEAR(reading->fresh);
    Py_CLEAR(reading->known);
    Py_CLEAR(reading->handle);
}

/* An attribute that is None: 1 or 0, or -1 with an exception set. */
static int is_none(PyObject *object, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(object, name);
    const int none = found == NULL ? -1 : found == Py_None;
    Py_XDECREF(found);
    return none;
}

static int set_integer(PyObject *object, PyObject *name, int64_t number)
{
    PyObject *value = PyLong_FromLongLong(number);
    const int good = value != NULL && PyObject_SetAttr(object, name, value) == 0;
    Py_XDECREF(value);
    return good;
}

static int set_truth(PyObject *object, PyObject *name, PyObject *truth)
{
    return PyObject_SetAttr(object, name, truth) == 0;
}

/* The integer that a method of no argument, or of one, returns; 0 with an exception set. */
static int asked_integer(PyObject *object, PyObject *method, PyObject *argument, int64_t *number)
{
    PyObject *found = PyObject_CallMethodObjArgs(object, method, argument, NULL);
    *number = found != NULL ? PyLong_AsLongLong(found) : 0;
    Py_XDECREF(found);
    return !PyErr_Occurred();
}

/* -- the stream --------------------------------------------------------------------------------------------------- */

/* Earlier readings are sent if a collective was issued since. 0 with an exception set. */
static int follow_collectives(PyObject *device_rows, const Reading *reading, int64_t seq)
{
    int64_t before;
    if (integer_of(device_rows, s__seq, &before) && before == seq)
        return 1;
    PyObject *issued = PyLong_FromLongLong(seq);
    const int done = issued != NULL && was_done(PyObject_CallMethodObjArgs(device_rows, s__send_after_collectives,
                                                                           reading->buffer, issued, NULL));
    Py_XDECREF(issued);
    return done;
}

/* Whether the buffer can read on this device now: 1 or 0, or -1 with an exception set. */
static int is_open(const Reading *reading, const DLTensor *tensor)
{
    int64_t type;
    const int sent = is_none(reading->buffer, s__unsent);
    if (sent <= 0)
        return sent;
    if (!integer_of(reading->buffer, s_dlpack_type, &type) || type != tensor->device.type)
        return 0;
    PyObject *captured = PyObject_CallMethodNoArgs(reading->driver, s_is_capturing);
    const int answer = captured == NULL ? -1 : captured == Py_False;
    Py_XDECREF(captured);
    return answer;
}

/* Find the StreamBuffer of the current stream, and make it if there is none; 0 with an exception set. */
static int find_stream(Reading *reading, PyObject *tensor, int32_t device)
{
    PyObject *index = PyLong_FromLong(device), *buffers = PyObject_GetAttr(reading->buffer, s__buffers), *key = NULL;
    if (index != NULL && buffers != NULL && PyDict_Check(buffers))
        reading->handle = PyObject_CallMethodOneArg(reading->driver, s_raw_stream, index);
    if (reading->handle != NULL)
        key = PyTuple_Pack(2, index, reading->handle);
    if (key != NULL)
        reading->stream = Py_XNewRef(PyDict_GetItemWithError(buffers, key));
    if (key != NULL && !PyErr_Occurred() && (reading->stream == NULL || is_none(reading->stream, s_rows))) {
        PyObject *place = PyObject_GetAttr(tensor, s_device);
        Py_XSETREF(reading->stream, place != NULL ? PyObject_CallMethodOneArg(reading->buffer, s__buffer, place) : NULL);
        Py_XDECREF(place);
    }
    Py_XDECREF(index);
    Py_XDECREF(buffers);
    Py_XDECREF(key);
    return reading->stream != NULL && !PyErr_Occurred();
}

/* Whether the earlier numbers of every known weight are packed on this stream. */
static int are_packed(const Reading *reading, const Asked *asked)
{
    for (int i = asked->fresh; i < asked->used; i++) {
        PyObject *row = PyTuple_GET_ITEM(asked->rows[i]->known, 3), *stream = PyObject_GetAttr(row, s_buffer);
        const int good = stream == reading->stream && is_none(row, s_packed) == 0;
        Py_XDECREF(stream);
        drop_error();
        if (!good)
            return 0;
    }
    return 1;
}

/* -- the tensors -------------------------------------------------------------------------------------------------- */

static int make_lists(Reading *reading, const Asked *asked)
{
    reading->fresh = PyList_New(0);
    reading->known = PyList_New(0);
    int good = reading->fresh != NULL && reading->known != NULL;
    for (int i = 0; good && i < asked->used; i++)
        good = i >= asked->fresh ? PyList_Append(reading->known, asked->rows[i]->known) == 0
                                 : PyList_Append(reading->fresh, asked->rows[i]->object) == 0;
    return good;
}

/* Enter the values into the buffer: their copy is to be started. 0 with an exception set. */
static int enter(const Reading *reading, const Frame *frame, int64_t position, int number)
{
    int64_t queued;
    PyObject *positions = PyObject_GetAttr(reading->stream, s_positions);
    int good = positions != NULL && PyList_Check(positions) && integer_of(reading->buffer, s__queued, &queued);
    for (int i = 0; good && i < number; i++)
        good = append(positions, PyLong_FromLongLong(position + i));
    Py_XDECREF(positions);
    return good && set_integer(reading->buffer, s__queued, queued + number) &&
           set_integer(reading->buffer, s__queued_page, frame->page);
}

/* -- launches ----------------------------------------------------------------------------------------------------- */

/* Have Python read the tensors that were not launched here; 0 with an exception set. */
static int read_rest(const Reading *reading, const Asked *asked, int64_t launched, int64_t position, PyObject *count)
{
    PyObject *elements = PyList_New(0), *done = PyLong_FromLongLong(launched), *first = PyLong_FromLongLong(position);
    int good = elements != NULL && done != NULL && first != NULL;
    for (int i = 0; good && i < asked->fresh; i++)
        good = append(elements, PyLong_FromLongLong(asked->elements[i]));
    good = good && was_done(PyObject_CallMethodObjArgs(reading->buffer, s_read_rest, reading->stream, reading->fresh, elements,
                                                       done, first, count, NULL));
    Py_XDECREF(elements);
    Py_XDECREF(done);
    Py_XDECREF(first);
    return good;
}

/* Launch the kernels that read the tensors, from here where that is possible; 0 with an exception set. */
static int launch_all(const Reading *reading, const Asked *asked, int64_t position, PyObject *count)
{
    const DLTensor *tensor = &asked->rows[0]->view.dl;
    int64_t current, done = 0;
    PyObject *kernels = PyObject_GetAttr(reading->buffer, s_reads), *rows = PyObject_GetAttr(reading->stream, s_rows);
    if (kernels != NULL && rows != NULL && PyDict_Check(kernels) &&
        asked_integer(reading->driver, s_current_device, NULL, &current) && current == tensor->device.id) {
        void *addresses[MOST_ROWS];
        for (int i = 0; i < asked->fresh; i++)
            addresses[i] = asked->rows[i]->view.address;
        done = launch_tensors(kernels, reading->handle, reading->fresh, addresses, asked->elements, rows, position, count);
    }
    Py_XDECREF(kernels);
    Py_XDECREF(rows);
    if (PyErr_Occurred())
        return 0;
    if (done < asked->fresh)
        return read_rest(reading, asked, done, position, count);
    /* torch's allocator gives freed memory to the next tensor of its stream, whose work comes after ours. Work on another stream is
       not ordered with that: so the tensors are kept until it is done. The default stream's memory is reused in its own order. */
    if (PyObject_IsTrue(reading->handle))
        return was_done(PyObject_CallMethodObjArgs(reading->buffer, s_keep, reading->stream, reading->fresh, NULL));
    return 1;
}

/* Have the weights noted, and the tensors read now or later; 0 with an exception set. */
static int read_all(FrameWriter *self, const Reading *reading, const Asked *asked, const Frame *frame, int64_t position,
                    int is_counted, PyObject **rows)
{
    PyObject *count = is_counted ? Py_True : Py_False;
    *rows = note_weights(self, reading, asked, position, count);
    if (*rows == NULL || asked->fresh == 0)
        return *rows != NULL;
    const int waits = frame->may_wait && truth_of(reading->buffer, s__may_wait) == 1;
    if (!waits && truth_of(reading->buffer, s__together) != 1)
        return launch_all(reading, asked, position, count);
    return have_wait(self, reading, s_waiting, reading->fresh, position, count) &&
           (!waits || hold(self, reading, asked->rows[0], position));
}

/* The numbers of this page arrive later. 0 with an exception set. */
static int note_page(PyObject *device_rows, int64_t number)
{
    PyObject *late = PyObject_GetAttr(device_rows, s_late_pages), *key = PyLong_FromLongLong(number);
    int good = late != NULL && key != NULL && PyDict_Check(late);
    if (good && find(late, key) == NULL) {
        PyObject *recorder = PyObject_GetAttr(device_rows, s__recorder);
        PyObject *page = recorder != NULL ? PyObject_GetAttr(recorder, s_page) : NULL;
        good = page != NULL && PyDict_SetItem(late, key, page) == 0;
        Py_XDECREF(recorder);
        Py_XDECREF(page);
    }
    Py_XDECREF(late);
    Py_XDECREF(key);
    return good;
}

static int64_t read_while_busy(FrameWriter *self, Reading *reading, const Asked *asked, const Frame *frame, int count,
                               PyObject **rows)
{
    int64_t index;
    const Row *row = asked->rows[0];
    const int open = is_open(reading, &row->view.dl);
    if (open <= 0)
        return open < 0 ? HAS_FAILED : ASK_PYTHON;
    if (!make_lists(reading, asked) || !find_stream(reading, row->object, row->view.dl.device.id))
        return HAS_FAILED;
    if (!are_packed(reading, asked))
        return ASK_PYTHON;
    /* From here on it cannot be undone: the values are in the file, and pending. So all that can be refused was asked before. */
    if (!set_truth(reading->buffer, s_takes, Py_True))
        return HAS_FAILED;
    const int64_t position = take_values(self, frame, asked->used, &index);
    if (position < 0 || !set_truth(reading->buffer, s_takes, Py_False))
        return HAS_FAILED;
    const int good = enter(reading, frame, position, asked->used) &&
                     read_all(self, reading, asked, frame, position, count, rows) &&
                     note_page(self->device_rows, frame->page);
    return good ? index : HAS_FAILED;
}

/* A signal's handler that comes where Python is called reads and sends nothing: see device_buffer.py. */
static int64_t read_with(FrameWriter *self, Reading *reading, const Asked *asked, const Frame *frame, int count,
                         PyObject **rows)
{
    if (truth_of(reading->buffer, s_is_busy) != 0) /* this is one: Python counts what it does not read */
        return PyErr_Occurred() ? HAS_FAILED : ASK_PYTHON;
    if (!follow_collectives(self->device_rows, reading, frame->seq) || !set_truth(reading->buffer, s_is_busy, Py_True))
        return HAS_FAILED;
    const int64_t index = read_while_busy(self, reading, asked, frame, count, rows);
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace); /* no function of CPython may be called while an exception is set */
    if (!set_truth(reading->buffer, s_takes, Py_False) || !set_truth(reading->buffer, s_is_busy, Py_False))
        drop_error();
    PyErr_Restore(type, error, trace);
    return index;
}

int64_t start_reads(FrameWriter *self, const Asked *asked, const Frame *frame, int count, PyObject **rows)
{
    Reading reading = {0};
    int64_t index = ASK_PYTHON;
    *rows = NULL;
    reading.buffer = PyObject_GetAttr(self->device_rows, s_device_buffer);
    if (reading.buffer == NULL)
        return HAS_FAILED;
    if (reading.buffer != Py_None) {
        reading.driver = PyObject_GetAttr(reading.buffer, s__driver);
        index = reading.driver != NULL ? read_with(self, &reading, asked, frame, count, rows) : HAS_FAILED;
    }
    if (index < 0)
        Py_CLEAR(*rows);
    clear_reading(&reading);
    return index;
}
