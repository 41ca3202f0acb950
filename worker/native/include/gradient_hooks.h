/* The hooks on outputs and parameters: each writes an ordinary gradient's frame, and calls Python for the others. */

#ifndef GPUWATCH_GRADIENT_HOOKS_H
#define GPUWATCH_GRADIENT_HOOKS_H

#include "rows.h"

/* The hook for the gradient of an output, or without a page of a parameter. */
PyObject *new_gradient_hook(FrameWriter *writer, PyObject *info, PyObject *role, PyObject *page);

/* Watch the gradients of the new outputs of a frame that is stored. -1 with an exception set. */
int watch_outputs(FrameWriter *self, Frame *frame, PyObject *info, PyObject *page);

/* Make the types, and add them to the module. -1 with an exception set. */
int add_gradient_hooks(PyObject *module);

#endif
