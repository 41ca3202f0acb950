/* Several threads over one tensor.

   Torch's own OpenMP threads read a large tensor. They divide it as at::parallel_for does, into equal stretches in
   order, so each thread finds the part that it wrote in its own cache. This code calls the functions that a compiler
   calls for `#pragma omp parallel`, in the library that torch has loaded. Another library would bring as many threads
   again. */

#include "threads.h"

#include <string.h>

#include "objects.h"
#include "reductions.h"

static void (*omp_parallel)(void (*part)(void *), void *shared, unsigned threads, unsigned flags);
static int (*omp_most_threads)(void), (*omp_is_parallel)(void), (*omp_thread)(void), (*omp_team)(void);

enum { MOST_THREADS = 64, LARGE = 1 << 18 };

typedef struct {
    const char *memory;
    size_t count;
    long bytes;
    struct { int64_t low, high, apart[6]; } found[MOST_THREADS];
} Shared;

static void extremes_of_part(void *argument)
{
    Shared *shared = argument;
    const size_t team = (size_t)omp_team(), thread = (size_t)omp_thread();
    const size_t stretch = (shared->count + team - 1) / team, start = thread * stretch;
    if (start >= shared->count)
        return;
    const size_t count = shared->count - start < stretch ? shared->count - start : stretch;
    reduce_extremes(shared->memory + start * (size_t)shared->bytes, count, shared->bytes, &shared->found[thread].low,
                    &shared->found[thread].high);
}

static void read_shared(const void *memory, size_t count, long bytes, int64_t *low, int64_t *high)
{
    int threads = 1;
    if (omp_parallel != NULL && count * (size_t)bytes >= LARGE && !omp_is_parallel())
        threads = omp_most_threads();
    if (threads <= 1) {
        reduce_extremes(memory, count, bytes, low, high);
        return;
    }
    if (threads > MOST_THREADS)
        threads = MOST_THREADS;
    Shared shared = {memory, count, bytes, {{0}}};
    for (int i = 0; i < threads; i++)
        shared.found[i].low = INT64_MAX;
    omp_parallel(extremes_of_part, &shared, (unsigned)threads, 0);
    *low = INT64_MAX;
    *high = 0;
    for (int i = 0; i < threads; i++) {
        *low = shared.found[i].low < *low ? shared.found[i].low : *low;
        *high = shared.found[i].high > *high ? shared.found[i].high : *high;
    }
}

/* A thread that releases the lock while another one runs Python code gets it back after 5 ms. So the lock is released
   only for tensors that take about as long to read. One thread reads 64 MiB in 2 ms and 128 MiB in 4.6 ms. With a second
   thread in Python code, 64 MiB took 32 ms with the lock released and 11 ms without (medians of 15 on a busy machine with
   2 cores). */
void read_extremes(const void *memory, size_t count, long bytes, int64_t *low, int64_t *high)
{
    if (count * (size_t)bytes < RELEASE_FROM) {
        read_shared(memory, count, bytes, low, high);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    read_shared(memory, count, bytes, low, high);
    Py_END_ALLOW_THREADS
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
    memcpy(&omp_parallel, &found[0], sizeof found[0]);
    memcpy(&omp_most_threads, &found[1], sizeof found[0]);
    memcpy(&omp_is_parallel, &found[2], sizeof found[0]);
    memcpy(&omp_thread, &found[3], sizeof found[0]);
    memcpy(&omp_team, &found[4], sizeof found[0]);
    Py_RETURN_NONE;
}
