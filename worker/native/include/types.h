/* How the types of this module are made. */

#ifndef GPUWATCH_TYPES_H
#define GPUWATCH_TYPES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define METHOD(FUNCTION) (PyCFunction)(void (*)(void))FUNCTION
#define TYPE_FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC)

/* Make a type and add it to the module: a reference, or NULL with an exception set. */
PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec);

#endif
