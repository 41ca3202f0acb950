/* Whether a frame may be written now, and what had been issued by then. */

#include "writer_state.h"

#include "objects.h"

/* A mode of the script (TorchFunctionMode) gets every function of torch that is called, those of a hook too: it would see calls
   that the script has not made. Dynamo, which compiles, would trace them. */
int may_look(FrameWriter *self)
{
    PyObject *depth = PyObject_CallNoArgs(self->modes);
    const int none = depth != NULL && PyLong_Check(depth) && PyLong_AsLong(depth) == 0;
    Py_XDECREF(depth);
    drop_error();
    return none && find(self->compiler, s__is_compiling_flag) == Py_False;
}

/* `issued` is the IssuedCounter of issued.c, which calls Python where something was issued since: there a signal's handler may
   run and raise. So an exception is not cleared here: `drop_error` ends only gpuwatch's own, and keeps the script's, which
   the hook raises in the end. When this function cleared any exception, every second Ctrl-C of a script was lost. */
int issued_now(FrameWriter *self, int64_t *seq)
{
    PyObject *found = PyObject_CallNoArgs(self->issued);
    const int good = found != NULL && PyLong_Check(found);
    *seq = good ? PyLong_AsLongLong(found) : -1;
    Py_XDECREF(found);
    drop_error();
    return good;
}
