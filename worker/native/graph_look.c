/* The operator with which a compiled graph reads an ordinary tensor: see worker/compile/dynamo.py. torch's dispatcher calls it,
   with the GIL, where the compiled code runs. The numbers wait in `seen` for the frame of their module. */

#include "graph_look.h"

#include "layout.h"
#include "objects.h"
#include "rows.h"
#include "tensor_view.h"
#include "types.h"

#define EACH_PART(DO) DO(seen) DO(cls) DO(numbers) DO(tensor) DO(otherwise)

typedef struct {
    PyObject_HEAD
    EACH_PART(AS_MEMBER)
    const Exchange *exchange;
} Look;

/* The TensorStats of an ordinary tensor; NULL, with no exception set, for any other */
static PyObject *look_at_bits(Look *self, PyObject *tensor, const TensorView *view)
{
    PyTypeObject *stats = (PyTypeObject *)self->numbers;
    Numbers numbers = {0};
    const int in_storage = is_in_storage(tensor, view);
    if (in_storage < 0)
        return NULL;
    if (in_storage == 0)
        return stats_of(stats, &numbers, KIND_NOT_MEASURABLE);
    return read_plain(view, &numbers) ? stats_of(stats, &numbers, KIND_MEASURED) : NULL;
}

/* 1 if it was an ordinary tensor; else 0, with no exception set */
static int look_at(Look *self, PyObject *tensor, PyObject *place)
{
    TensorView view;
    const Py_ssize_t position = PyLong_CheckExact(place) ? PyLong_AsSsize_t(place) : -1;
    drop_error();
    if (position < 0 || (PyObject *)Py_TYPE(tensor) != self->tensor || !view_of(self->exchange, tensor, &view) ||
        !is_plain(&view))
        return 0;
    PyTypeObject *type = (PyTypeObject *)self->cls;
    PyObject *dims = dims_of(&view), *stats = look_at_bits(self, tensor, &view), *seen = type->tp_alloc(type, 2);
    if (dims == NULL || stats == NULL || seen == NULL || position >= PyList_GET_SIZE(self->seen)) {
        drop_error();
        Py_XDECREF(dims);
        Py_XDECREF(stats);
        Py_XDECREF(seen);
        return 0;
    }
    /* a NamedTuple is a tuple with nothing added: tp_alloc makes it without its __new__, and its items are NULL until now */
    PyTuple_SET_ITEM(seen, 0, stats);
    PyTuple_SET_ITEM(seen, 1, dims);
    if (PyList_SetItem(self->seen, position, seen) < 0)
        drop_error();
    return 1;
}

static PyObject *look_call(Look *self, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_GET_SIZE(args) == 3 && (kwargs == NULL || PyDict_GET_SIZE(kwargs) == 0) &&
        look_at(self, PyTuple_GET_ITEM(args, 0), PyTuple_GET_ITEM(args, 2)))
        return settled(Py_NewRef(Py_None));
    return keeps_error() ? settled(NULL) : PyObject_Call(self->otherwise, args, kwargs);
}

static int look_traverse(Look *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
#define VISIT(NAME) Py_VISIT(self->NAME);
    EACH_PART(VISIT)
    return 0;
}

static int look_clear(Look *self)
{
#define CLEAR(NAME) Py_CLEAR(self->NAME);
    EACH_PART(CLEAR)
    return 0;
}

static void look_dealloc(Look *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    look_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *look_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"exchange", "seen", "cls", "numbers", "tensor", "otherwise", NULL};
    PyObject *exchange;
    Look *self = (Look *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    const int parsed = PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!O!OO", names, &exchange, &PyList_Type, &self->seen,
                                                   &PyType_Type, &self->cls, &PyType_Type, &self->numbers,
                                                   &self->tensor, &self->otherwise);
#define HOLD(NAME) Py_XINCREF(self->NAME);
    EACH_PART(HOLD)
    if (!parsed || (self->exchange = exchange_of(exchange)) == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyType_Slot look_slots[] = {
    {Py_tp_doc, "Look(exchange, seen, cls, numbers, tensor, otherwise)\n\n"
                "Called with (tensor, token, place), it puts the numbers of an ordinary tensor into seen[place]. For any other\n"
                "tensor it calls `otherwise`."},
    {Py_tp_new, look_new}, {Py_tp_call, look_call}, {Py_tp_dealloc, look_dealloc}, {Py_tp_traverse, look_traverse},
    {Py_tp_clear, look_clear}, {0, NULL},
};
static PyType_Spec look_spec = {"gpuwatch.worker.native.core.Look", sizeof(Look), 0, TYPE_FLAGS, look_slots};

int add_graph_look(PyObject *module)
{
    PyTypeObject *type = add_type(module, "Look", &look_spec);
    Py_XDECREF(type);
    return type == NULL ? -1 : 0;
}
