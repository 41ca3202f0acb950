/* Counts the operations that were issued on all process groups. Every hook asks for this number.

   It runs no Python code where nothing was issued since the last call, unless a process group is written in Python. So no
   signal's handler can run in here and raise in the middle of a hook: Python runs the handler at the next function of Python
   (errors.c). Where something was issued, `count` is called, which is Python (worker/record/collectives.py). What that raises
   may be the script's. So it goes on to the caller, who must not clear it. */

#include "issued.h"

#include "objects.h"
#include "types.h"

static PyObject *s_distributed;

typedef struct {
    PyObject_HEAD
    PyObject *history; /* `seq` and `groups` of the last count, `table`, `silent` */
    PyObject *count;
} IssuedCounter;

/* Add what a group has issued; 0 if that is not known. A group that is known to count nothing is left out. */
static int add_group(PyObject *silent, PyObject *group, int64_t *total, Py_ssize_t *counting)
{
    PyObject *key = PyLong_FromVoidPtr(group);
    PyObject *known = key != NULL ? find(silent, key) : NULL;
    Py_XDECREF(key);
    if (known != NULL && is_ref_to(known, group))
        return 1;
    int64_t number;
    PyObject *found = PyObject_CallMethodNoArgs(group, s__get_sequence_number_for_group);
    const int good = found != NULL && integer_from(found, &number);
    Py_XDECREF(found);
    if (!good)
        return 0;
    *total += number;
    *counting += 1;
    return 1;
}

/* Add the messages that were received; 0 if that is not known. */
static int add_messages(PyObject *table, int64_t *total)
{
    PyObject *groups = object_of(table);
    if (groups == NULL) /* it is gone, or none was given: then `table` is no weak reference */
        return 1;
    /* object_of has taken a reference: the attributes are Python's, and another thread may drop the table */
    int64_t received = 0;
    PyObject *messages = PyObject_GetAttr(groups, s_messages);
    const int good = messages != NULL && integer_of(messages, s_received, &received);
    Py_XDECREF(messages);
    Py_DECREF(groups);
    *total += received;
    return good;
}

/* What was issued; 0 if Python must count: something was issued, or is not known. An exception may be set. */
static int read_issued(PyObject *history, PyObject *map, int64_t *total)
{
    int64_t seq, groups;
    int good = 0;
    Py_ssize_t counting = 0;
    PyObject *silent = PyObject_GetAttr(history, s_silent), *table = PyObject_GetAttr(history, s_table);
    /* torch's counter is bound by pybind11, and may release the GIL: another thread may make a group then. A list of
       the keys holds the groups, and does not change under the loop, as PyDict_Next forbids. */
    PyObject *each = PyDict_Keys(map);
    if (silent != NULL && table != NULL && each != NULL && PyDict_CheckExact(silent) &&
        integer_of(history, s_seq, &seq) && integer_of(history, s_groups, &groups) && add_messages(table, total)) {
        good = groups == PyList_GET_SIZE(each);
        for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(each); i++)
            good = add_group(silent, PyList_GET_ITEM(each, i), total, &counting);
        if (good && counting == 0)
            *total = -1;
        else
            good = good && *total == seq;
    }
    Py_XDECREF(silent);
    Py_XDECREF(table);
    Py_XDECREF(each);
    return good;
}

static PyObject *counter_call(IssuedCounter *self, PyObject *args, PyObject *kwargs)
{
    (void)args, (void)kwargs;
    /* sys.modules, and no import: a script that uses no torch.distributed must not get it from here */
    PyObject *module = find(PyImport_GetModuleDict(), s_distributed);
    if (module == NULL)
        return PyLong_FromLong(-1);
    int64_t total = 0;
    /* the module's own dictionary, which costs a third of an attribute; a module of another class may have none */
    PyObject *map = PyModule_CheckExact(module) ? Py_XNewRef(find(PyModule_GetDict(module), s__pg_map))
                                                : PyObject_GetAttr(module, s__pg_map);
    const int known = map != NULL && PyDict_CheckExact(map) &&
                      (PyDict_GET_SIZE(map) == 0 ? (total = -1, 1) : read_issued(self->history, map, &total));
    drop_error();
    Py_XDECREF(map);
    /* hooks in Python call this as well: what a handler has raised in a group of Python's must not wait for the next hook */
    return settled(known ? PyLong_FromLongLong(total) : PyObject_CallNoArgs(self->count));
}

static PyObject *counter_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *history, *count;
    static char *names[] = {"history", "count", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO", names, &history, &count))
        return NULL;
    IssuedCounter *self = (IssuedCounter *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->history = Py_NewRef(history);
        self->count = Py_NewRef(count);
    }
    return (PyObject *)self;
}

static int counter_traverse(IssuedCounter *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->history);
    Py_VISIT(self->count);
    return 0;
}

static void counter_dealloc(IssuedCounter *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->history);
    Py_CLEAR(self->count);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* Without tp_clear: a call needs what it holds, and that lives as long as its module. */
static PyType_Slot counter_slots[] = {
    {Py_tp_doc, "IssuedCounter(history, count): calling it returns what `count` would."},
    {Py_tp_new, counter_new}, {Py_tp_call, counter_call}, {Py_tp_dealloc, counter_dealloc},
    {Py_tp_traverse, counter_traverse}, {0, NULL},
};
static PyType_Spec counter_spec = {"gpuwatch.worker.native.core.IssuedCounter", sizeof(IssuedCounter), 0, TYPE_FLAGS,
                                   counter_slots};

int add_issued(PyObject *module)
{
    s_distributed = PyUnicode_InternFromString("torch.distributed.distributed_c10d");
    PyTypeObject *type = s_distributed != NULL ? add_type(module, "IssuedCounter", &counter_spec) : NULL;
    Py_XDECREF(type);
    return type == NULL ? -1 : 0;
}
