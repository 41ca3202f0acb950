/* RecorderLock (worker/record/progress.py): who writes the recorder from Python. */

#ifndef GPUWATCH_WRITER_LOCK_H
#define GPUWATCH_WRITER_LOCK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* Take the lock and enter this thread into the recorder's cursor, `cells`; 0 with an exception set. */
int take_lock(PyObject *mutex, int64_t *cells);

/* Give it back. An exception that is set stays so. */
void leave_lock(PyObject *mutex, int64_t *cells);

/* Make the type, and add it to the module. -1 with an exception set. */
int add_writer_lock(PyObject *module);

#endif
