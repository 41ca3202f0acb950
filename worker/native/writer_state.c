/* Whether a frame may be written now, and what had been issued by then. */

#include "writer_state.h"

#include "objects.h"

int may_look(FrameWriter *self)
{
    PyObject *depth = PyObject_CallNoArgs(self->modes);
    const int none = depth != NULL && PyLong_Check(depth) && PyLong_AsLong(depth) == 0;
    Py_XDECREF(depth);
    drop_error();
    return none && find(self->compiler, s__is_compiling_flag) == Py_False;
}

int issued_now(FrameWriter *self, int64_t *seq)
{
    PyObject *found = PyObject_CallNoArgs(self->issued);
    const int good = found != NULL && PyLong_Check(found);
    *seq = good ? PyLong_AsLongLong(found) : -1;
    Py_XDECREF(found);
    drop_error();
    return good;
}
