/* The extension module gpuwatch.worker.native.signals: notes in the recorder when a signal first reaches a handler of the
   script's, and who sent it. A scheduler that preempts a job may send its signal to the ranks alone. Only the kernel tells
   them so: a script's handler may do no more than set a flag, and the script saves and exits batches later.

   CPython's own handler in C, which signal.signal() installs, notes the signal for the interpreter. This file puts a
   handler in front of that one. It stores four integers in mapped memory and calls CPython's, with the same arguments and
   under the same flags and mask. In Python nothing differs: signal.getsignal(), the frames, the time at which the script's
   handler runs. Signals at their default (SIG_DFL, SIG_IGN) stay as they are.

   A handler of signals may call async-signal-safe functions only (signal-safety(7)): here getpid and clock_gettime.

   This file stands alone, so that it is loaded before torch is, and built where core is not. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

/* The entry of a signal: core/recorder/heard_signals.py reads it. `FIRST_NS` is stored last. */
enum { FIRST_NS, BATCH, SENDER, FROM_PARENT_NS, ENTRY };
enum { MOST = 65, TAKEN = -1 };

/* Static, and never given back: a signal may come at any time until the process has ended. */
static Py_buffer memory;
static int64_t *entries;
static const int64_t *batch;
static pid_t own, parent;
static int entry_of[MOST];
static struct sigaction before[MOST];

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int take(int64_t *place)
{
    int64_t nothing = 0;
    return __atomic_compare_exchange_n(place, &nothing, TAKEN, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

/* sigaction(2): si_pid is set where a process has sent the signal. Not in a list: what a timer or a file of this process
   has caused. The sender of another namespace of processes is 0, as the kernel is. */
static void write_down(int number, const siginfo_t *info)
{
    const int is_sent = info->si_code == SI_USER || info->si_code == SI_QUEUE || info->si_code == SI_TKILL;
    if (!is_sent && info->si_code != SI_KERNEL)
        return;
    const pid_t sender = is_sent ? info->si_pid : 0;
    int64_t *entry = entries + ENTRY * entry_of[number];
    if (sender == own)
        return;
    if (sender == parent) {
        if (take(&entry[FROM_PARENT_NS]))
            __atomic_store_n(&entry[FROM_PARENT_NS], now_ns(), __ATOMIC_RELEASE);
    } else if (take(&entry[FIRST_NS])) {
        entry[BATCH] = *batch;
        entry[SENDER] = sender;
        __atomic_store_n(&entry[FIRST_NS], now_ns(), __ATOMIC_RELEASE);
    }
}

static void note(int number, siginfo_t *info, void *context)
{
    const int error = errno;
    if (getpid() == own) /* a fork has these handlers, too, and the recorder is its parent's */
        write_down(number, info);
    errno = error;
    if (before[number].sa_flags & SA_SIGINFO)
        before[number].sa_sigaction(number, info, context);
    else
        before[number].sa_handler(number);
}

static PyObject *note_in(PyObject *module, PyObject *args)
{
    PyObject *buffer;
    Py_ssize_t at, batch_at, count;
    long from;
    Py_buffer given;
    (void)module;
    if (!PyArg_ParseTuple(args, "Onnnl", &buffer, &at, &count, &batch_at, &from))
        return NULL;
    if (PyObject_GetBuffer(buffer, &given, PyBUF_WRITABLE) < 0)
        return NULL;
    const Py_ssize_t size = (Py_ssize_t)sizeof *entries;
    if (at < 0 || batch_at < 0 || count < 0 || count > MOST || at % size || batch_at % size || (uintptr_t)given.buf % size ||
        at + count * ENTRY * size > given.len || batch_at + size > given.len) {
        PyBuffer_Release(&given);
        PyErr_SetString(PyExc_ValueError, "expected places of integers of 8 bytes within the buffer");
        return NULL;
    }
    memory = given; /* an earlier one stays mapped, too */
    batch = (const int64_t *)((const char *)memory.buf + batch_at);
    entries = (int64_t *)((char *)memory.buf + at);
    own = getpid();
    parent = (pid_t)from;
    Py_RETURN_NONE;
}

static PyObject *stand_before(PyObject *module, PyObject *args)
{
    int number, entry;
    struct sigaction now, replaced;
    (void)module;
    if (!PyArg_ParseTuple(args, "ii", &number, &entry))
        return NULL;
    if (entries == NULL || number <= 0 || number >= MOST || entry < 0) {
        PyErr_SetString(PyExc_ValueError, "expected a signal, and note_in() before");
        return NULL;
    }
    if (sigaction(number, NULL, &now) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    if (!(now.sa_flags & SA_SIGINFO) && (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN))
        Py_RETURN_FALSE;
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == note)
        Py_RETURN_TRUE;
    entry_of[number] = entry;
    before[number] = now;
    struct sigaction ours = now;
    ours.sa_sigaction = note;
    ours.sa_flags |= SA_SIGINFO;
    if (sigaction(number, &ours, &replaced) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    if (replaced.sa_handler != now.sa_handler) { /* code in C has set another one meanwhile, in another thread */
        sigaction(number, &replaced, NULL);
        Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"note_in", note_in, METH_VARARGS,
     "note_in(buffer, at, count, batch_at, parent) -> None\n\n"
     "Write into `count` entries from byte `at` of a writable buffer, which is held until the process ends. The rank's\n"
     "batch stands at byte `batch_at`. `parent`: who started this process. Raises ValueError, BufferError, TypeError."},
    {"stand_before", stand_before, METH_VARARGS,
     "stand_before(signal, entry) -> bool\n\n"
     "Note the signal, and then call the handler that it has now. False: it has none. Raises ValueError and OSError."},
    {NULL, NULL, 0, NULL},
};

/* There is one handler of a signal in a process: a subinterpreter has none of its own. signal.signal() may be called in the
   main thread only, and so is this. */
static PyModuleDef_Slot slots[] = {
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {.m_base = PyModuleDef_HEAD_INIT, .m_name = "signals", .m_methods = methods,
                                        .m_slots = slots};

PyMODINIT_FUNC PyInit_signals(void)
{
    return PyModuleDef_Init(&definition);
}
