/* Reads a tensor: a large one with torch's own threads, and a very large one with the GIL released. */

#ifndef GPUWATCH_THREADS_H
#define GPUWATCH_THREADS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>

/* Tensors of at least this many bytes are read with the GIL released. threads.c has the measurement. */
#define RELEASE_FROM ((size_t)1 << 27)

enum { MOST_PARTS = 64 };

/* Call `read` for the parts of `count` elements of `bytes` bytes each, of which `first` is the first of `count`; a part may
   have none. Returns how many parts there are. The caller holds the GIL. It is released for RELEASE_FROM bytes
   and more, so another thread may run then. */
int read_parts(size_t count, long bytes, void (*read)(void *about, int part, size_t first, size_t count), void *about);

/* use_threads(parallel, most, is_parallel, thread, team), for Python. */
PyObject *use_threads(PyObject *module, PyObject *const *args, Py_ssize_t given);

#endif
