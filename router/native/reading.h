/* What a decision reads of Python's numbers: where a value is something else an exception is set. */
#ifndef ROUTER_NATIVE_READING_H
#define ROUTER_NATIVE_READING_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#include <stdint.h>

static inline double number(PyObject *value) {
    return value == NULL ? -1.0 : PyFloat_AsDouble(value);
}

static inline int read_attribute(PyObject *of, PyObject *name, double *into) {
    PyObject *value = PyObject_GetAttr(of, name);
    *into = number(value);
    Py_XDECREF(value);
    return !PyErr_Occurred();
}

static inline int64_t num_tokens(PyObject *value) {
    long long tokens = value == NULL ? -1 : PyLong_AsLongLong(value);
    if (!PyErr_Occurred() && (tokens < 0 || tokens > INT_MAX))
        PyErr_Format(PyExc_OverflowError, "%lld tokens: needs 0 to %d", tokens, INT_MAX);
    return tokens;
}

/* For a prompt's tokens in a step. */
static inline int64_t read_room(PyObject *value) {
    int64_t room = num_tokens(value);
    if (!PyErr_Occurred() && room == 0) PyErr_SetString(PyExc_ZeroDivisionError, "room = 0: needs 1 token");
    return room;
}

#endif
