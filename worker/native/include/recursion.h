/* Gives back to a script what gpuwatch takes of Python's recursion limit. All of them are functions for Python. */

#ifndef GPUWATCH_RECURSION_H
#define GPUWATCH_RECURSION_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* A forward pre-hook has begun. Until `work_ends` it may take some frames. */
PyObject *call_begins(PyObject *module, PyObject *none);
/* A forward hook has begun. Until `call_ends` it may take some frames. */
PyObject *work_begins(PyObject *module, PyObject *none);
PyObject *work_ends(PyObject *module, PyObject *none);
PyObject *call_ends(PyObject *module, PyObject *none);

/* The frames below the caller are ours: it is to be the first one. */
PyObject *first_frame(PyObject *module, PyObject *none);

#endif
