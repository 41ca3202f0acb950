/* The type FrameWriter. */

#ifndef GPUWATCH_FRAME_WRITER_H
#define GPUWATCH_FRAME_WRITER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Make the type, and add it to the module. -1 with an exception set. */
int add_frame_writer(PyObject *module);

#endif
