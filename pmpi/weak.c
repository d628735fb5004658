/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * Leaves programs alone that ask whether there is an MPI: by weak references to its functions,
 * which are NULL where nobody has them. This library, preloaded, has them all, so such a program
 * would call MPI where there is none. And programs of another MPI than the one that this library is
 * for, which a script may start: its wrappers would cut their handles, where those are wider.
 *
 * In: the relocations of all that is loaded when the program starts. Out: the same, but each weak
 * reference that this library alone answers is NULL, as it would be without it; and where the MPI
 * library is another one, each reference to a wrapper is to what comes next. Invariants: a
 * reference that this MPI's library answers is not touched, nor, without MPI, is one that is not
 * weak. What the program loads later is not looked at. Whatever fails here leaves a reference as it
 * was.
 */
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <mpi.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "next.h"

#if __ELF_NATIVE_CLASS == 64
#define SYMBOL_OF(info) ELF64_R_SYM(info)
#else
#define SYMBOL_OF(info) ELF32_R_SYM(info)
#endif
#define BIND_OF(info) ELF64_ST_BIND(info) /* alike in both */

#if defined(OPEN_MPI)
#define FOR_OPEN_MPI true
#else
#define FOR_OPEN_MPI false
#endif

static bool other_mpi; /* the MPI library is not the one that this library is for */

/* What the tables of one loaded object say. */
struct tables {
    const ElfW(Sym) * symbols;
    const char *names;
    const ElfW(Rela) * data, *calls; /* relocations */
    size_t data_size, calls_size;    /* bytes */
};

static bool within(const struct dl_phdr_info *object, ElfW(Word) type, ElfW(Word) flags,
                   uintptr_t address)
{
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *one = &object->dlpi_phdr[i];
        uintptr_t begin = object->dlpi_addr + one->p_vaddr;
        if (one->p_type == type && (one->p_flags & flags) == flags && address >= begin &&
            address - begin < one->p_memsz)
            return true;
    }
    return false;
}

static int find_own(struct dl_phdr_info *object, size_t size, void *own)
{
    (void)size;
    if (!within(object, PT_LOAD, 0, (uintptr_t)find_own))
        return 0;
    *(struct dl_phdr_info *)own = *object;
    return 1;
}

/* Does this library answer the reference? One to a wrapper may still wait for its first call. */
static bool is_ours(const struct dl_phdr_info *own, const char *name, bool weak, void *target)
{
    if (!other_mpi)
        return weak && within(own, PT_LOAD, 0, (uintptr_t)target);
    return (strncmp(name, "MPI_", 4) == 0 || strncmp(name, "mpi_", 4) == 0) &&
           within(own, PT_LOAD, 0, (uintptr_t)dlsym(RTLD_DEFAULT, name));
}

/* The linker has made the whole pages of RELRO read-only. */
static void put(const struct dl_phdr_info *object, void **slot, void *target)
{
    uintptr_t size = (uintptr_t)sysconf(_SC_PAGESIZE), page = (uintptr_t)slot & ~(size - 1);
    bool sealed = within(object, PT_GNU_RELRO, 0, page + size - 1);
    if (!within(object, PT_LOAD, PF_W, (uintptr_t)slot) ||
        (sealed && mprotect((void *)page, size, PROT_READ | PROT_WRITE) != 0))
        return;
    *slot = target;
    if (sealed)
        mprotect((void *)page, size, PROT_READ);
}

static void leave_these(const struct dl_phdr_info *own, const struct dl_phdr_info *object,
                        const struct tables *tables, const ElfW(Rela) * first, size_t size)
{
    for (size_t i = 0; i < size / sizeof(*first); i++) {
        const ElfW(Sym) *symbol = &tables->symbols[SYMBOL_OF(first[i].r_info)];
        void **slot = (void **)(object->dlpi_addr + first[i].r_offset);
        const char *name = tables->names + symbol->st_name;
        bool weak = BIND_OF(symbol->st_info) == STB_WEAK;
        if (symbol->st_shndx != SHN_UNDEF || !is_ours(own, name, weak, *slot))
            continue;
        void *next = dlsym(RTLD_NEXT, name);
        if (other_mpi ? weak || next != NULL : next == NULL)
            put(object, slot, next);
    }
}

/* Some linkers leave the addresses in the dynamic section relative to the object. */
static const void *absolute(const struct dl_phdr_info *object, ElfW(Addr) address)
{
    return (const void *)(address < object->dlpi_addr ? object->dlpi_addr + address : address);
}

static struct tables read_tables(const struct dl_phdr_info *object, const ElfW(Dyn) * entry)
{
    struct tables tables = {0};
    for (; entry->d_tag != DT_NULL; entry++) {
        const void *address = absolute(object, entry->d_un.d_ptr);
        switch (entry->d_tag) {
        case DT_SYMTAB:
            tables.symbols = address;
            break;
        case DT_STRTAB:
            tables.names = address;
            break;
        case DT_RELA:
            tables.data = address;
            break;
        case DT_RELASZ:
            tables.data_size = entry->d_un.d_val;
            break;
        case DT_JMPREL:
            tables.calls = address;
            break;
        case DT_PLTRELSZ:
            tables.calls_size = entry->d_un.d_val;
            break;
        }
    }
    return tables;
}

static int leave_all(struct dl_phdr_info *object, size_t size, void *own)
{
    (void)size;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        if (object->dlpi_phdr[i].p_type != PT_DYNAMIC)
            continue;
        const void *dynamic = (const void *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
        struct tables tables = read_tables(object, dynamic);
        if (tables.symbols == NULL || tables.names == NULL || tables.data == NULL)
            continue; /* on a machine whose relocations look otherwise, too */
        leave_these(own, object, &tables, tables.data, tables.data_size);
        if (tables.calls)
            leave_these(own, object, &tables, tables.calls, tables.calls_size);
    }
    return 0;
}

__attribute__((constructor)) void weak_leave_alone(void);

void weak_leave_alone(void)
{
    struct dl_phdr_info own;
    int saved = errno;
    bool any = dlsym(RTLD_NEXT, "PMPI_Init") != NULL;
    bool open_mpi = dlsym(RTLD_NEXT, "ompi_mpi_comm_world") != NULL;
    other_mpi = any && (open_mpi != FOR_OPEN_MPI || standard_abi());
    if ((!any || other_mpi) && dl_iterate_phdr(find_own, &own))
        dl_iterate_phdr(leave_all, &own);
    dlerror(); /* what was not found is none of the program's errors */
    errno = saved;
}
