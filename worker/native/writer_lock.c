/* The lock of the Python code that writes. Python runs signals' handlers between bytecodes, and `with` runs none between
   its C functions and its body: so what is taken here is given back, whatever a handler raises. In Python a handler could
   raise after the lock was taken and before `try` is entered.

   The cells are those of an array of Python's. To borrow its memory keeps the array from growing, and so from moving. They are
   read and written with the GIL held, and so need no atomics. */

#include "writer_lock.h"

#include <structmember.h>

#include "objects.h"
#include "types.h"

enum { HOLDER = 1, DEPTH = 2, CELLS = 3 }; /* of RecorderWriter.cursor */

typedef struct {
    PyObject_HEAD
    PyObject *mutex; /* a threading.RLock */
    Py_buffer cells;
} WriterLock;

int take_lock(PyObject *mutex, int64_t *cells)
{
    /* This releases the GIL while it waits. A signal's handler runs meanwhile, and ends the wait if it raises. */
    PyObject *taken = PyObject_CallMethodNoArgs(mutex, s_acquire);
    if (taken == NULL)
        return 0;
    Py_DECREF(taken);
    cells[HOLDER] = (int64_t)PyThread_get_thread_ident();
    cells[DEPTH]++;
    return 1;
}

void leave_lock(PyObject *mutex, int64_t *cells)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace); /* no function of CPython may be called while an exception is set */
    if (--cells[DEPTH] == 0) /* an RLock: the same thread may have taken it several times */
        cells[HOLDER] = 0;   /* before it is given back: the next holder writes its own id here */
    PyObject *left = PyObject_CallMethodNoArgs(mutex, s_release);
    Py_XDECREF(left);
    PyErr_Restore(type, error, trace);
}

static PyObject *lock_enter(WriterLock *self, PyObject *none)
{
    (void)none;
    return take_lock(self->mutex, self->cells.buf) ? Py_NewRef(Py_None) : NULL;
}

static PyObject *lock_exit(WriterLock *self, PyObject *const *args, Py_ssize_t given)
{
    (void)args, (void)given;
    leave_lock(self->mutex, self->cells.buf);
    Py_RETURN_NONE;
}

static PyObject *lock_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *cursor;
    static char *names[] = {"cursor", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &cursor))
        return NULL;
    WriterLock *self = (WriterLock *)type->tp_alloc(type, 0);
    PyObject *threading = self != NULL ? PyImport_ImportModule("threading") : NULL;
    if (threading != NULL)
        self->mutex = PyObject_CallMethod(threading, "RLock", NULL);
    Py_XDECREF(threading);
    if (self != NULL && self->mutex != NULL && PyObject_GetBuffer(cursor, &self->cells, PyBUF_WRITABLE) == 0) {
        if (self->cells.len >= (Py_ssize_t)(CELLS * sizeof(int64_t)))
            return (PyObject *)self;
        PyErr_SetString(PyExc_ValueError, "no room in the cursor");
    }
    Py_XDECREF(self);
    return NULL;
}

static int lock_traverse(WriterLock *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->mutex);
    return 0;
}

static void lock_dealloc(WriterLock *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->cells.obj != NULL)
        PyBuffer_Release(&self->cells);
    Py_CLEAR(self->mutex);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyMemberDef lock_members[] = {
    {"mutex", T_OBJECT, offsetof(WriterLock, mutex), READONLY, "The threading.RLock."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef lock_methods[] = {
    {"__enter__", METHOD(lock_enter), METH_NOARGS, "Wait for the lock, and take it."},
    {"__exit__", METHOD(lock_exit), METH_FASTCALL, "Give it back."},
    {NULL, NULL, 0, NULL},
};

/* Without tp_clear: a `with` needs what it holds. */
static PyType_Slot lock_slots[] = {
    {Py_tp_doc, "WriterLock(cursor): a lock whose holder the native writer finds in the cursor."},
    {Py_tp_new, lock_new}, {Py_tp_dealloc, lock_dealloc}, {Py_tp_traverse, lock_traverse},
    {Py_tp_members, lock_members}, {Py_tp_methods, lock_methods}, {0, NULL},
};
static PyType_Spec lock_spec = {"gpuwatch.worker.native.core.WriterLock", sizeof(WriterLock), 0,
                                TYPE_FLAGS | Py_TPFLAGS_BASETYPE, lock_slots};

int add_writer_lock(PyObject *module)
{
    PyTypeObject *type = add_type(module, "WriterLock", &lock_spec);
    Py_XDECREF(type);
    return type == NULL ? -1 : 0;
}
