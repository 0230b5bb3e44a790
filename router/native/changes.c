/* A few hints get a member of a packed table, or lose it: what `PackedTable.add` and `discard` do to most.
 *
 * packed_table.py has the law and does the same where this is not compiled. Whatever takes more than a slot, as growing
 * does, is left to it.
 *
 * Knows 64-bit hints and member numbers; knows neither replicas nor prefixes.
 */
#include "table.h"

typedef struct {
    Table table;
    Py_buffer hints, used, ghosts; /* of the segments: slots that are not empty, and those of them without members */
    uint64_t word, bit;            /* of the member */
    long long num_entries, max_entries, grow_at, fill_limit; /* the others are asked for where something is added */
} Change;

static int has_words(const Table *table, uint64_t slot) {
    for (int word = 0; word < table->num_words; word++)
        if (item(&table->words[word], slot) != 0) return 1;
    return 0;
}

static void count(const Py_buffer *of, const Table *table, uint64_t slot, int difference) {
    uint64_t segment = slot >> table->bits;
    put(of, segment, item(of, segment) + (uint64_t)(int64_t)difference);
}

/* Whether the hint has the member now. 0: that takes more than a slot. `is_new`: it had not. */
static int add_one(Change *change, uint64_t hint, int *is_new) {
    const Table *table = &change->table;
    uint64_t slot = slot_of(table, hint), held = item(&table->words[change->word], slot);
    int is_known = item(&table->keys, slot) == hint, is_entry = is_known && has_words(table, slot);
    *is_new = !(is_known && held & change->bit);
    if (!*is_new) return 1;
    if (!is_entry) {
        if (change->num_entries >= change->max_entries) return 0;
        if (is_known) {
            count(&change->ghosts, table, slot, -1);
        } else {
            if (change->num_entries >= change->grow_at) return 0;
            if (item(&change->used, slot >> table->bits) >= (uint64_t)change->fill_limit) return 0;
            put(&table->keys, slot, hint);
            count(&change->used, table, slot, 1);
        }
        change->num_entries++;
    }
    put(&table->words[change->word], slot, held | change->bit);
    return 1;
}

/* Whether the hint had the member: an empty slot has none. */
static int discard_one(Change *change, uint64_t hint) {
    const Table *table = &change->table;
    uint64_t slot = slot_of(table, hint), held = item(&table->words[change->word], slot);
    if (!(held & change->bit)) return 0;
    put(&table->words[change->word], slot, held ^ change->bit);
    if (!has_words(table, slot)) {
        change->num_entries--;
        count(&change->ghosts, table, slot, 1);
    }
    return 1;
}

/* --- what Python hands over: where it is something else an exception is set ------------------------------------- */

static int open_segments(PyObject *from, const Table *table, Py_buffer *into) {
    if (!open_numbers(from, PyBUF_STRIDED, into)) return 0;
    if ((unsigned long long)into->shape[0] >= table->num_segments) return 1;
    PyBuffer_Release(into);
    PyErr_SetString(PyExc_ValueError, "not the table's own segments");
    return 0;
}

static void close_change(Change *change) {
    PyBuffer_Release(&change->hints);
    PyBuffer_Release(&change->used);
    PyBuffer_Release(&change->ghosts);
    close_table(&change->table);
}

static int open_change(PyObject *args, const char *format, Change *into) {
    Table *table = &into->table;
    PyObject *hints, *keys, *words, *used, *ghosts;
    long long member;
    if (!PyArg_ParseTuple(
            args, format, &hints, &member, &table->prime, &table->factor, &table->bits, &table->high, &table->low,
            &table->num_segments, &table->empty, &keys, &PyTuple_Type, &words, &used, &ghosts, &into->num_entries,
            &into->max_entries, &into->grow_at, &into->fill_limit
        ) ||
        !open_table(keys, words, PyBUF_STRIDED, table))
        return 0;
    if (member < 0 || member >= 64LL * table->num_words) {
        PyErr_Format(PyExc_ValueError, "member %lld: needs 0 to %d", member, 64 * table->num_words - 1);
    } else if (open_segments(used, table, &into->used)) {
        if (open_segments(ghosts, table, &into->ghosts)) {
            if (open_numbers(hints, PyBUF_STRIDED_RO, &into->hints)) {
                into->word = (uint64_t)member / 64, into->bit = (uint64_t)1 << member % 64;
                return 1;
            }
            PyBuffer_Release(&into->ghosts);
        }
        PyBuffer_Release(&into->used);
    }
    close_table(table);
    return 0;
}

/* --- the module -------------------------------------------------------------------------------------------------- */

static PyObject *add(PyObject *module, PyObject *args) {
    (void)module;
    Change change;
    if (!open_change(args, "OL((KKiKKK)KOO!OOL)LLL", &change)) return NULL;
    Py_ssize_t place = 0, num_added = 0;
    uint64_t xor_added = 0;
    for (; place < change.hints.shape[0]; place++) {
        uint64_t hint = item(&change.hints, (uint64_t)place);
        int is_new;
        if (!add_one(&change, hint, &is_new)) break;
        if (is_new) num_added++, xor_added ^= hint;
    }
    close_change(&change);
    return Py_BuildValue("nLnK", place, change.num_entries, num_added, (unsigned long long)xor_added);
}

static PyObject *discard(PyObject *module, PyObject *args) {
    (void)module;
    Change change;
    if (!open_change(args, "OL((KKiKKK)KOO!OOL)", &change)) return NULL;
    Py_ssize_t num_gone = 0;
    uint64_t xor_gone = 0, xor_unknown = 0;
    for (Py_ssize_t place = 0; place < change.hints.shape[0]; place++) {
        uint64_t hint = item(&change.hints, (uint64_t)place);
        if (discard_one(&change, hint)) num_gone++, xor_gone ^= hint;
        else xor_unknown ^= hint;
    }
    Py_ssize_t num_unknown = change.hints.shape[0] - num_gone;
    close_change(&change);
    return Py_BuildValue(
        "LnKnK", change.num_entries, num_gone, (unsigned long long)xor_gone, num_unknown, (unsigned long long)xor_unknown
    );
}

static PyMethodDef METHODS[] = {
    {"add", add, METH_VARARGS, "add(hints, member, all, max_entries, grow_at, fill_limit): how far it came."},
    {"discard", discard, METH_VARARGS, "discard(hints, member, all): what had it, and what had not."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "router.native.changes", "Members of hints.", 0, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_changes(void) {
    PyObject *module = PyModule_Create(&MODULE);
    if (module != NULL && PyModule_AddIntMacro(module, MOST_WORDS) < 0) Py_CLEAR(module);
    return module;
}
