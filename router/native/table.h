/* The slots of a packed table: packed_table.py has the law, linear_hashing.py where a hint belongs. */
#ifndef ROUTER_NATIVE_TABLE_H
#define ROUTER_NATIVE_TABLE_H

#include "hints.h"

enum { MOST_WORDS = 16 };

typedef struct {
    Py_buffer keys, words[MOST_WORDS]; /* of the slots */
    int num_words;
    unsigned long long empty, prime, factor, high, low, num_segments;
    int bits;
} Table;

/* Where the hint is, or the empty slot where it would be put. */
static inline uint64_t slot_of(const Table *table, uint64_t hint) {
    uint64_t place = hint % table->prime * table->factor % table->prime;
    uint64_t segment = place >> table->bits & table->high, inside = ((uint64_t)1 << table->bits) - 1;
    if (segment >= table->num_segments) segment &= table->low;
    uint64_t slot = segment << table->bits | (place & inside), key = item(&table->keys, slot);
    while (key != hint && key != table->empty) {
        slot = (slot & ~inside) | ((slot + 1) & inside);
        key = item(&table->keys, slot);
    }
    return slot;
}

static inline void close_table(Table *table) {
    for (int word = 0; word < table->num_words; word++) PyBuffer_Release(&table->words[word]);
    PyBuffer_Release(&table->keys);
}

static inline int is_whole(const Table *table) {
    unsigned long long num_slots = table->num_segments << table->bits;
    int is_so = table->prime && table->low < table->num_segments && num_slots <= (unsigned long long)table->keys.shape[0];
    for (int word = 0; word < table->num_words; word++)
        is_so = is_so && num_slots <= (unsigned long long)table->words[word].shape[0];
    if (!is_so) PyErr_SetString(PyExc_ValueError, "not the table's own numbers");
    return is_so;
}

/* Its memory, beside the numbers that are there. flags: to read it, or to write. 0: an exception is set. */
static inline int open_table(PyObject *keys, PyObject *words, int flags, Table *into) {
    Py_ssize_t num_words = PyTuple_Size(words);
    if (num_words < 1 || num_words > MOST_WORDS) {
        PyErr_Format(PyExc_ValueError, "takes sets of 1 to %d words", MOST_WORDS);
        return 0;
    }
    into->num_words = 0;
    if (!open_numbers(keys, flags, &into->keys)) return 0;
    while (into->num_words < num_words) {
        if (!open_numbers(PyTuple_GetItem(words, into->num_words), flags, &into->words[into->num_words])) break;
        into->num_words++;
    }
    if (into->num_words == num_words && is_whole(into)) return 1;
    close_table(into);
    return 0;
}

#endif
