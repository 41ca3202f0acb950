/* The methods of torch's ProcessGroup and Work, with the notes that each call makes before and after. */

#ifndef GPUWATCH_GROUP_METHODS_H
#define GPUWATCH_GROUP_METHODS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Make the types, and add GroupWriter to the module. -1 with an exception set. */
int add_group_methods(PyObject *module);

#endif
