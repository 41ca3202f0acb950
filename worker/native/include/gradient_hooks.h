/* Hooks on outputs and parameters. Each writes the frames of ordinary gradients and leaves the others to Python. */

#ifndef GPUWATCH_GRADIENT_HOOKS_H
#define GPUWATCH_GRADIENT_HOOKS_H

#include "rows.h"

/* The hook for the gradient of an output; without a page, for that of a parameter. */
PyObject *new_gradient_hook(FrameWriter *writer, PyObject *info, PyObject *role, PyObject *page);

/* Hook the new outputs of a frame that was stored. -1 with an exception set. */
int watch_outputs(FrameWriter *self, Frame *frame, PyObject *info, PyObject *page);

/* Make the types, and add them to the module. -1 with an exception set. */
int add_gradient_hooks(PyObject *module);

/* Have dynamo trace this Python function where autograd, compiled as a whole, calls a hook of ours */
PyObject *trace_hooks_as(PyObject *module, PyObject *function);

#endif
