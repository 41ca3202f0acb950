/* Reads a tensor: large ones with torch's own threads, and with the interpreter's lock released. */

#ifndef GPUWATCH_THREADS_H
#define GPUWATCH_THREADS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>

/* From so many bytes on, the interpreter's lock is released while a tensor is read. See threads.c for the measurement. */
#define RELEASE_FROM ((size_t)1 << 27)

/* `reduce_extremes` of memory that the caller keeps alive. Called with the lock held; another thread may run meanwhile
   if there are RELEASE_FROM bytes. */
void read_extremes(const void *memory, size_t count, long bytes, int64_t *low, int64_t *high);

/* use_threads(parallel, most, is_parallel, thread, team), for Python. */
PyObject *use_threads(PyObject *module, PyObject *const *args, Py_ssize_t given);

#endif
