/* Several threads over one tensor.

   Torch's own OpenMP threads read a large tensor. They divide it as at::parallel_for does, into equal stretches in
   order, so each thread finds the part that it wrote in its own cache. This code calls the functions that a compiler
   calls for `#pragma omp parallel`, in the library that torch has loaded. Another library would bring as many threads
   again.

   Rules of the two libraries:
   - A thread of OpenMP has no state of CPython's. So what it runs, `read`, touches no Python object.
   - With the GIL released this thread touches none either. The caller holds a reference to the tensor: its
     memory stays, unless the script itself resizes the storage in another thread, which would break its own reads, too.
   - Within a parallel loop all threads have work already: omp_in_parallel is asked first.
   - A forked child has one thread, and the library still counts those of its parent: worker/record/host_reduce.py calls
     use_threads() in the child. */

#include "threads.h"

#include <string.h>

#include "objects.h"

static void (*omp_parallel)(void (*part)(void *), void *shared, unsigned threads, unsigned flags);
static int (*omp_most_threads)(void), (*omp_is_parallel)(void), (*omp_thread)(void), (*omp_team)(void);

enum { LARGE = 1 << 18 };

typedef struct {
    size_t count;
    void (*read)(void *about, int part, size_t first, size_t count);
    void *about;
    int parts;
} Shared;

static void read_own_part(void *argument)
{
    Shared *shared = argument;
    const size_t team = (size_t)omp_team(), thread = (size_t)omp_thread();
    const size_t stretch = (shared->count + team - 1) / team, start = thread * stretch;
    const size_t first = start < shared->count ? start : shared->count, rest = shared->count - first;
    if (thread == 0)
        shared->parts = (int)team;
    shared->read(shared->about, (int)thread, first, rest < stretch ? rest : stretch);
}

/* A thread that releases the lock while another one runs Python code gets it back after 5 ms. So the lock is released
   only for tensors that take about as long to read. One thread reads 64 MiB in 2 ms and 128 MiB in 4.6 ms. With a second
   thread in Python code, 64 MiB took 32 ms with the lock released and 11 ms without (medians of 15 on a busy machine with
   2 cores). */
int read_parts(size_t count, long bytes, void (*read)(void *about, int part, size_t first, size_t count), void *about)
{
    Shared shared = {count, read, about, 1};
    const size_t size = count * (size_t)bytes;
    PyThreadState *released = size >= RELEASE_FROM ? PyEval_SaveThread() : NULL;
    const int threads = omp_parallel != NULL && size >= LARGE && !omp_is_parallel() ? omp_most_threads() : 1;
    if (threads <= 1)
        read(about, 0, 0, count);
    else
        omp_parallel(read_own_part, &shared, (unsigned)(threads < MOST_PARTS ? threads : MOST_PARTS), 0);
    if (released != NULL)
        PyEval_RestoreThread(released);
    return shared.parts;
}

PyObject *use_threads(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    void *found[5] = {NULL};
    (void)module;
    if (given != 0 && given != 5)
        return wrong("expected use_threads(parallel, most, is_parallel, thread, team) or use_threads()");
    for (int i = 0; i < given; i++)
        found[i] = PyLong_AsVoidPtr(args[i]);
    if (PyErr_Occurred())
        return NULL;
    /* ISO C has no cast between pointers to data and to functions; POSIX, for dlsym, has them converted */
    memcpy(&omp_parallel, &found[0], sizeof found[0]);
    memcpy(&omp_most_threads, &found[1], sizeof found[0]);
    memcpy(&omp_is_parallel, &found[2], sizeof found[0]);
    memcpy(&omp_thread, &found[3], sizeof found[0]);
    memcpy(&omp_team, &found[4], sizeof found[0]);
    Py_RETURN_NONE;
}
