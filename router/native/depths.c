/* How deep each replica holds a chain: `PackedTable.depths` where a set is one word, up to 64 members.
 *
 * packed_table.py has the law and does the same where this is not compiled, linear_hashing.py where a hint belongs.
 *
 * Knows 64-bit hints and member numbers; knows neither replicas nor prefixes.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    Py_buffer keys, words; /* of the slots */
    unsigned long long empty, prime, factor, high, low, num_segments;
    int bits;
} Table;

typedef struct {
    Py_ssize_t left, right; /* all hold what is before the first hint, nobody what is after the last */
    uint64_t at_left, at_right;
} Stretch;

enum { MOST_GUESSES = 8, MOST_STRETCHES = MOST_GUESSES + 8 * sizeof(Py_ssize_t) };

static uint64_t item(const Py_buffer *of, uint64_t place) {
    uint64_t value;
    memcpy(&value, (const char *)of->buf + (Py_ssize_t)place * of->strides[0], sizeof value);
    return value;
}

static uint64_t holders(const Table *table, uint64_t hint) {
    uint64_t place = hint % table->prime * table->factor % table->prime;
    uint64_t segment = place >> table->bits & table->high, inside = ((uint64_t)1 << table->bits) - 1;
    if (segment >= table->num_segments) segment &= table->low;
    uint64_t slot = segment << table->bits | (place & inside);
    for (;; slot = (slot & ~inside) | ((slot + 1) & inside)) {
        uint64_t key = item(&table->keys, slot);
        if (key == hint) return item(&table->words, slot);
        if (key == table->empty) return 0;
    }
}

/* The first guess that lies within and was not tried, else the middle. */
static Py_ssize_t next_place(const Stretch *at, const Py_ssize_t *guesses, int num_guesses, int *num_tried) {
    while (*num_tried < num_guesses) {
        Py_ssize_t guess = guesses[(*num_tried)++];
        if (at->left < guess && guess < at->right) return guess;
    }
    return (at->left + at->right) >> 1;
}

static int note(PyObject *found, Py_ssize_t depth, uint64_t members) {
    PyObject *group = Py_BuildValue("nK", depth, (unsigned long long)members);
    int is_noted = group != NULL && PyList_Append(found, group) == 0;
    Py_XDECREF(group);
    return is_noted;
}

static int find_depths(
    PyObject *found, const Table *table, const Py_buffer *chain, uint64_t members, const Py_ssize_t *guesses,
    int num_guesses
) {
    Stretch deeper[MOST_STRETCHES], at = {-1, chain->shape[0], members, 0};
    int num_deeper = 0, num_tried = 0;
    for (Py_ssize_t place = 0;; place = next_place(&at, guesses, num_guesses, &num_tried)) {
        uint64_t held = (holders(table, item(chain, place)) & at.at_left) | at.at_right;
        if (place == 0) {
            at.left = 0, at.at_left = held;
            if (!held) return 1;
        } else if (held == at.at_left) {
            at.left = place;
        } else {
            if (held != at.at_right) deeper[num_deeper++] = (Stretch){place, at.right, held, at.at_right};
            at.right = place, at.at_right = held;
        }
        while (at.right - at.left == 1) {
            if (at.at_left != at.at_right && !note(found, at.right, at.at_left ^ at.at_right)) return 0;
            if (num_deeper == 0) return 1;
            at = deeper[--num_deeper];
        }
    }
}

/* --- the module -------------------------------------------------------------------------------------------------- */

static int open_numbers(PyObject *from, Py_buffer *into) {
    if (PyObject_GetBuffer(from, into, PyBUF_STRIDED_RO) < 0) return 0;
    if (into->ndim == 1 && into->itemsize == sizeof(uint64_t)) return 1;
    PyBuffer_Release(into);
    PyErr_SetString(PyExc_ValueError, "needs memory of 64-bit numbers");
    return 0;
}

/* The chain's end is the first of them. -1: an exception is set. */
static int read_guesses(PyObject *from, Py_ssize_t num_hints, Py_ssize_t *into) {
    int num_guesses = 0;
    into[num_guesses++] = num_hints - 1;
    for (Py_ssize_t index = 0; index < PyTuple_Size(from) && num_guesses < MOST_GUESSES; index++) {
        into[num_guesses] = PyLong_AsSsize_t(PyTuple_GetItem(from, index));
        if (PyErr_Occurred()) return -1;
        num_guesses++;
    }
    return num_guesses;
}

static int is_whole(const Table *table) {
    unsigned long long num_slots = table->num_segments << table->bits;
    if (table->prime && table->num_segments && num_slots <= (unsigned long long)table->keys.shape[0] &&
        num_slots <= (unsigned long long)table->words.shape[0])
        return 1;
    PyErr_SetString(PyExc_ValueError, "not the table's own numbers");
    return 0;
}

static PyObject *depths_in(const Table *table, PyObject *hints, uint64_t members, PyObject *guess_tuple) {
    Py_buffer chain;
    Py_ssize_t guesses[MOST_GUESSES];
    if (!open_numbers(hints, &chain)) return NULL;
    if (chain.shape[0] == 0) {
        PyBuffer_Release(&chain);
        return PyErr_Format(PyExc_ValueError, "a chain of no hints");
    }
    PyObject *found = PyList_New(0);
    int num_guesses = read_guesses(guess_tuple, chain.shape[0], guesses);
    if (found != NULL && (num_guesses < 0 || !find_depths(found, table, &chain, members, guesses, num_guesses)))
        Py_CLEAR(found);
    PyBuffer_Release(&chain);
    return found;
}

static PyObject *depths(PyObject *module, PyObject *args) {
    (void)module;
    Table table;
    PyObject *hints, *guesses, *keys, *words, *found = NULL;
    unsigned long long members;
    if (!PyArg_ParseTuple(
            args, "OKO!(KKiKKK)KOO", &hints, &members, &PyTuple_Type, &guesses, &table.prime, &table.factor, &table.bits,
            &table.high, &table.low, &table.num_segments, &table.empty, &keys, &words
        ) ||
        !open_numbers(keys, &table.keys))
        return NULL;
    if (open_numbers(words, &table.words)) {
        if (is_whole(&table)) found = depths_in(&table, hints, members, guesses);
        PyBuffer_Release(&table.words);
    }
    PyBuffer_Release(&table.keys);
    return found;
}

static PyMethodDef METHODS[] = {
    {"depths", depths, METH_VARARGS, "depths(chain, members, guesses, hashing, empty, keys, words): of each group."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "router.native.depths", "How deep chains are held.", 0, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_depths(void) {
    return PyModule_Create(&MODULE);
}
