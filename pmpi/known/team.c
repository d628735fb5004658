/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * A program of several threads and without MPI: `team THREADS SECONDS`. Each thread uses SECONDS
 * of CPU.
 */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

static double seconds;

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *burn(void *argument)
{
    while (cpu_seconds() < seconds)
        ;
    return argument;
}

int main(int argc, char *argv[])
{
    if (argc != 3)
        return 2;
    pthread_t others[64];
    int count = atoi(argv[1]) - 1;
    seconds = atof(argv[2]);
    for (int i = 0; i < count && i < 64; i++)
        if (pthread_create(&others[i], NULL, burn, NULL) != 0)
            return 1;
    burn(NULL);
    for (int i = 0; i < count && i < 64; i++)
        pthread_join(others[i], NULL);
    return 0;
}
