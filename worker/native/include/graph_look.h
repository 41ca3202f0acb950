/* Reads tensors inside a compiled graph, for worker/compile/dynamo.py. */

#ifndef GPUWATCH_GRAPH_LOOK_H
#define GPUWATCH_GRAPH_LOOK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Make the type, and add it to the module. -1 with an exception set. */
int add_graph_look(PyObject *module);

#endif
