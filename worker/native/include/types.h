/* How the types of this module are made. */

#ifndef GPUWATCH_TYPES_H
#define GPUWATCH_TYPES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* A PyMethodDef holds functions of several signatures as one type. A cast by way of void (*)(void) is what gcc accepts without
   -Wcast-function-type; CPython calls the function by the signature that its METH_ flags say. */
#define METHOD(FUNCTION) (PyCFunction)(void (*)(void))FUNCTION
/* All types here are made at run time (PyType_FromSpec). Since 3.9 (bpo-40217) that has three consequences: an instance owns a
   reference to its type, so tp_traverse visits it, and tp_dealloc gives it up last. tp_dealloc first takes the object from
   gc, which could otherwise run in the midst of it and visit what is cleared already. */
#define TYPE_FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC)

/* Make a type and add it to the module: a reference, or NULL with an exception set. Its objects have no state to save, which
   __torch_unserializable__ says: torch (utils/hooks.py) otherwise warns when a tensor is saved that has such a hook. */
PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec);

#endif
