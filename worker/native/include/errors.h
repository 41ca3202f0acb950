/* What becomes of an exception that this part of gpuwatch meets. Nothing else here calls PyErr_Clear: what it clears may be
   the script's Ctrl-C. CPython requires that no exception is set when C calls Python again, or returns an object; so each
   function that may meet one calls `drop_error`, or returns with it set and says so. */

#ifndef GPUWATCH_ERRORS_H
#define GPUWATCH_ERRORS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Find the rule in Python. -1 with an exception set. */
int find_rule(void);

/* Whether the exception that is set is gpuwatch's own. It stays set. */
int is_own_error(void);

/* End the exception that is set, if there is one. gpuwatch's own is cleared: the Python path meets it again and records it.
   Any other is kept for `settled`, which the function that Python or torch has called must return through. */
void drop_error(void);

/* Whether this thread keeps an exception: what is going on here is to end without more work. The script waits for it, and
   more of Python would run with it out of sight. */
int keeps_error(void);

/* Raise the exception that is kept, in place of returning `result`, which may be NULL. Else returns `result`. */
PyObject *settled(PyObject *result);

#endif
