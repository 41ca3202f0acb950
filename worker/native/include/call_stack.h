/* The stack of module calls that run (worker/hooks/forward.py), and an optimizer's parameters by module. */

#ifndef GPUWATCH_CALL_STACK_H
#define GPUWATCH_CALL_STACK_H

#include "frame_writer.h"

/* Methods of FrameWriter. */
PyObject *writer_enter(FrameWriter *self, PyObject *const *args, Py_ssize_t given);
PyObject *writer_leave(FrameWriter *self, PyObject *const *args, Py_ssize_t given);
PyObject *writer_by_module(FrameWriter *self, PyObject *const *args, Py_ssize_t given);

#endif
