/* Reads a tensor: a large one with torch's own threads, and a very large one with the interpreter's lock released. */

#ifndef GPUWATCH_THREADS_H
#define GPUWATCH_THREADS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>

/* Tensors of at least this many bytes are read with the interpreter's lock released. threads.c has the measurement. */
#define RELEASE_FROM ((size_t)1 << 27)

/* `reduce_extremes` of memory that the caller keeps alive. The caller holds the interpreter's lock. It is released for
   RELEASE_FROM bytes and more, so another thread may run then. */
void read_extremes(const void *memory, size_t count, long bytes, int64_t *low, int64_t *high);

/* use_threads(parallel, most, is_parallel, thread, team), for Python. */
PyObject *use_threads(PyObject *module, PyObject *const *args, Py_ssize_t given);

#endif
