/* How often blocks were used: counts by hint in packed tables. use_counts.py has the law, and does the same where this
 * is not compiled.
 *
 * A table is slots of two numbers, a power of two of them: a hint, and how often it was used; 0 where nothing is. A hint
 * belongs where its product with a secret says, or in the first free slot behind that.
 *
 * Knows 64-bit hints; knows neither replicas nor prefixes.
 */
#include "hints.h"

enum { MOST_TABLES = 2 };

typedef struct {
    uint64_t hint, uses;
} Slot;

typedef struct {
    Py_buffer memory;
    Slot *slots;
    uint64_t last; /* slot */
    int shift;     /* of a product, to a slot */
} Table;

/* Where it is, or would be: there is a free slot. */
static Slot *slot_of(const Table *table, uint64_t factor, uint64_t hint) {
    uint64_t at = table->last == 0 ? 0 : hint * factor >> table->shift, num_tried = 0;
    while (table->slots[at].uses != 0 && table->slots[at].hint != hint && num_tried++ < table->last)
        at = (at + 1) & table->last;
    return &table->slots[at];
}

static uint64_t uses_of(const Table *tables, int num_tables, uint64_t factor, uint64_t hint) {
    uint64_t uses = 0;
    for (int each = 0; each < num_tables; each++) uses += slot_of(&tables[each], factor, hint)->uses;
    return uses;
}

/* --- what Python hands over: where it is something else an exception is set ------------------------------------- */

static int open_table(PyObject *from, int flags, Table *into) {
    if (PyObject_GetBuffer(from, &into->memory, flags) < 0) return 0;
    uint64_t num_slots = (uint64_t)into->memory.len / sizeof(Slot);
    if (num_slots != 0 && (num_slots & (num_slots - 1)) == 0 && num_slots * sizeof(Slot) == (uint64_t)into->memory.len &&
        (uintptr_t)into->memory.buf % sizeof(uint64_t) == 0) {
        into->slots = into->memory.buf;
        into->last = num_slots - 1;
        into->shift = 64;
        while (num_slots >>= 1) into->shift--;
        return 1;
    }
    PyBuffer_Release(&into->memory);
    PyErr_SetString(PyExc_ValueError, "not a table's own memory: needs slots of 16 bytes, a power of two of them");
    return 0;
}

static void close_tables(Table *tables, int num_tables) {
    while (num_tables-- > 0) PyBuffer_Release(&tables[num_tables].memory);
}

/* How many; -1: an exception is set, and none is open. */
static int open_tables(PyObject *from, Table *into) {
    Py_ssize_t num_tables = PyTuple_Size(from);
    if (num_tables > MOST_TABLES) {
        PyErr_Format(PyExc_ValueError, "takes up to %d tables", MOST_TABLES);
        return -1;
    }
    for (int each = 0; each < num_tables; each++)
        if (!open_table(PyTuple_GetItem(from, each), PyBUF_SIMPLE, &into[each])) {
            close_tables(into, each);
            return -1;
        }
    return (int)num_tables;
}

static int is_stride(Py_ssize_t stride) {
    if (stride < 1) PyErr_Format(PyExc_ValueError, "stride = %zd: needs 1 block", stride);
    return stride >= 1;
}

/* --- the module -------------------------------------------------------------------------------------------------- */

static PyObject *add(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *memory, *hints;
    unsigned long long factor, num_entries, most;
    Py_ssize_t stride;
    Table table;
    Py_buffer chain;
    if (!PyArg_ParseTuple(args, "OKKKOn", &memory, &factor, &num_entries, &most, &hints, &stride) || !is_stride(stride) ||
        !open_table(memory, PyBUF_WRITABLE, &table))
        return NULL;
    if (most > table.last) { /* one slot is free, or a search would have no end */
        close_tables(&table, 1);
        return PyErr_Format(PyExc_ValueError, "%llu entries: needs less than there are slots", most);
    }
    if (!open_numbers(hints, PyBUF_STRIDED_RO, &chain)) {
        close_tables(&table, 1);
        return NULL;
    }
    for (Py_ssize_t place = stride - 1; place < chain.shape[0]; place += stride) {
        Slot *slot = slot_of(&table, factor, item(&chain, (uint64_t)place));
        if (slot->uses == 0) {
            if (num_entries >= most) continue;
            slot->hint = item(&chain, (uint64_t)place);
            num_entries++;
        }
        slot->uses++;
    }
    PyBuffer_Release(&chain);
    close_tables(&table, 1);
    return PyLong_FromUnsignedLongLong(num_entries);
}

static PyObject *leading(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *memory, *hints;
    unsigned long long factor;
    Py_ssize_t stride;
    double least;
    Table tables[MOST_TABLES];
    Py_buffer chain;
    if (!PyArg_ParseTuple(args, "O!KOnd", &PyTuple_Type, &memory, &factor, &hints, &stride, &least) || !is_stride(stride) ||
        !open_numbers(hints, PyBUF_STRIDED_RO, &chain))
        return NULL;
    int num_tables = open_tables(memory, tables);
    Py_ssize_t low = 0, high = chain.shape[0] / stride, middle = 0;
    while (low < high) {
        if ((double)uses_of(tables, num_tables, factor, item(&chain, (uint64_t)((middle + 1) * stride - 1))) >= least) {
            low = middle + 1;
            middle = 2 * middle + 1 < (low + high) / 2 ? 2 * middle + 1 : (low + high) / 2;
        } else {
            high = middle;
            middle = (low + high) / 2;
        }
    }
    close_tables(tables, num_tables);
    PyBuffer_Release(&chain);
    return num_tables < 0 ? NULL : PyLong_FromSsize_t(low * stride);
}

static PyObject *total(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *memory, *hints;
    unsigned long long factor;
    Table tables[MOST_TABLES];
    Py_buffer numbers;
    if (!PyArg_ParseTuple(args, "O!KO", &PyTuple_Type, &memory, &factor, &hints) || !open_numbers(hints, PyBUF_STRIDED_RO, &numbers))
        return NULL;
    int num_tables = open_tables(memory, tables);
    uint64_t uses = 0;
    for (Py_ssize_t place = 0; place < numbers.shape[0]; place++)
        uses += uses_of(tables, num_tables, factor, item(&numbers, (uint64_t)place));
    close_tables(tables, num_tables);
    PyBuffer_Release(&numbers);
    return num_tables < 0 ? NULL : PyLong_FromUnsignedLongLong(uses);
}

static PyMethodDef METHODS[] = {
    {"add", add, METH_VARARGS, "add(table, factor, num_entries, most, hints, stride): entries there are then."},
    {"leading", leading, METH_VARARGS, "leading(tables, factor, hints, stride, least): blocks."},
    {"total", total, METH_VARARGS, "total(tables, factor, hints): uses of all of them."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "router.native.uses", "How often blocks were used.", 0, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_uses(void) {
    return PyModule_Create(&MODULE);
}
