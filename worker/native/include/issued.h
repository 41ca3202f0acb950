/* The number of operations that were issued on all process groups. */

#ifndef GPUWATCH_ISSUED_H
#define GPUWATCH_ISSUED_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Make the type, and add it to the module. -1 with an exception set. */
int add_issued(PyObject *module);

#endif
