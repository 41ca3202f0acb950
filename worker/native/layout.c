/* The numbers of layout.h as tables, and as a dict that Python compares with its own. */

#include "layout.h"

/* Tables by the code of a dtype. 0 is no dtype: the entry stays 0. */
#define INF_OF(NAME, CODE, ENCODING, INF, TYPE, BITS) [CODE] = INF,
const int64_t inf_bits[FLOATS_END] = {EACH_FLOAT(INF_OF)};

#define ENCODING_OF(NAME, CODE, ENCODING, INF, TYPE, BITS) [CODE] = ENCODING,
const int64_t encodings[FLOATS_END] = {EACH_FLOAT(ENCODING_OF)};

#define BYTES_OF(NAME, CODE, ENCODING, INF, TYPE, BITS) [CODE] = BITS / 8,
const long float_bytes[FLOATS_END] = {EACH_FLOAT(BYTES_OF)};

static int add(PyObject *numbers, const char *name, int64_t number)
{
    PyObject *value = PyLong_FromLongLong(number);
    const int failed = value == NULL || PyDict_SetItemString(numbers, name, value) < 0;
    Py_XDECREF(value);
    return failed;
}

PyObject *layout_numbers(void)
{
    PyObject *numbers = PyDict_New();
    if (numbers == NULL)
        return NULL;
    int failed = add(numbers, "NOTHING", NOTHING);
#define ADD_NUMBER(NAME, NUMBER) failed |= add(numbers, #NAME, NAME);
    EACH_NUMBER(ADD_NUMBER)
#define ADD_FLOAT(NAME, CODE, ENCODING, INF, TYPE, BITS)      \
    failed |= add(numbers, "DTYPE_" #NAME, DTYPE_##NAME);     \
    failed |= add(numbers, "ENCODING_" #NAME, ENCODING);      \
    failed |= add(numbers, "INF_" #NAME, INF);
    EACH_FLOAT(ADD_FLOAT)
#define ADD_OTHER(NAME, CODE, TYPE, BITS) failed |= add(numbers, "DTYPE_" #NAME, DTYPE_##NAME);
    EACH_OTHER(ADD_OTHER)
    if (failed)
        Py_CLEAR(numbers);
    return numbers;
}
