/* Memory of 64-bit numbers, one after another or every so many bytes: where it is something else an exception is set. */
#ifndef ROUTER_NATIVE_HINTS_H
#define ROUTER_NATIVE_HINTS_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* flags: PyBUF_STRIDED to write, PyBUF_STRIDED_RO to read. */
static inline int open_numbers(PyObject *from, int flags, Py_buffer *into) {
    if (PyObject_GetBuffer(from, into, flags) < 0) return 0;
    if (into->ndim == 1 && into->itemsize == sizeof(uint64_t)) return 1;
    PyBuffer_Release(into);
    PyErr_SetString(PyExc_ValueError, "needs memory of 64-bit numbers");
    return 0;
}

static inline uint64_t item(const Py_buffer *of, uint64_t place) {
    uint64_t value;
    memcpy(&value, (const char *)of->buf + (Py_ssize_t)place * of->strides[0], sizeof value);
    return value;
}

static inline void put(const Py_buffer *into, uint64_t place, uint64_t value) {
    memcpy((char *)into->buf + (Py_ssize_t)place * into->strides[0], &value, sizeof value);
}

#endif
