! SPDX-License-Identifier: LGPL-3.0-or-later
!
! Stencils that do not say where their iterations end: `halo KIND STEPS`. line: on a line of ranks by
! Isend, Irecv and Waitall; a rank at its end has one neighbour. plane: on a plane of ranks by Sendrecv,
! to all four sides, of which some are MPI_PROC_NULL. Neither agrees on anything. solver: in each step
! an inner loop of another length, of which each turn has two sums, and then one sum. Prints the steps.
! Compiled with -DF08 for `use mpi_f08`, else for `use mpi`.
#if defined(F08)
#define COMM type(MPI_Comm)
#define REQUEST type(MPI_Request)
#else
#define COMM integer
#define REQUEST integer
#endif
program halo
#if defined(F08)
  use mpi_f08
#else
  use mpi
#endif
  implicit none
  integer :: rank, ranks, step, steps, ierr
  real(8) :: cells(0:100), before(0:100)
  character(len=16) :: kind, number
  COMM :: plane

  call get_command_argument(1, kind)
  call get_command_argument(2, number)
  read (number, *) steps
  call MPI_Init(ierr)
  call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierr)
  call MPI_Comm_size(MPI_COMM_WORLD, ranks, ierr)
  call MPI_Bcast(steps, 1, MPI_INTEGER, 0, MPI_COMM_WORLD, ierr)
  call MPI_Cart_create(MPI_COMM_WORLD, 2, [ranks / 2, 2], [.false., .false.], .false., plane, ierr)
  cells = rank
  do step = 1, steps
    if (kind == 'line') then
      call line()
    else if (kind == 'solver') then
      call solve(10 + mod(7 * step, 13))
    else
      call side(0, 1)
      call side(0, -1)
      call side(1, 1)
      call side(1, -1)
    end if
    call relax(2d-3)
  end do
  if (rank == 0) print '(i0)', steps
  call MPI_Comm_free(plane, ierr)
  call MPI_Finalize(ierr)

contains

  subroutine line()
    REQUEST :: requests(4)
    integer :: n
    n = 0
    if (rank > 0) then
      call MPI_Irecv(cells(0), 1, MPI_DOUBLE_PRECISION, rank - 1, 0, MPI_COMM_WORLD, &
                     requests(n + 1), ierr)
      call MPI_Isend(cells(1), 1, MPI_DOUBLE_PRECISION, rank - 1, 0, MPI_COMM_WORLD, &
                     requests(n + 2), ierr)
      n = n + 2
    end if
    if (rank < ranks - 1) then
      call MPI_Irecv(cells(100), 1, MPI_DOUBLE_PRECISION, rank + 1, 0, MPI_COMM_WORLD, &
                     requests(n + 1), ierr)
      call MPI_Isend(cells(99), 1, MPI_DOUBLE_PRECISION, rank + 1, 0, MPI_COMM_WORLD, &
                     requests(n + 2), ierr)
      n = n + 2
    end if
    call MPI_Waitall(n, requests, MPI_STATUSES_IGNORE, ierr)
  end subroutine line

  subroutine solve(turns)
    integer, intent(in) :: turns
    real(8) :: mine, all
    integer :: turn
    mine = rank
    do turn = 1, turns
      call MPI_Allreduce(mine, all, 1, MPI_DOUBLE_PRECISION, MPI_SUM, MPI_COMM_WORLD, ierr)
      call relax(3d-4)
      call MPI_Allreduce(mine, all, 1, MPI_DOUBLE_PRECISION, MPI_SUM, MPI_COMM_WORLD, ierr)
    end do
    call MPI_Allreduce(mine, all, 1, MPI_DOUBLE_PRECISION, MPI_MAX, MPI_COMM_WORLD, ierr)
  end subroutine solve

  subroutine side(direction, way)
    integer, intent(in) :: direction, way
    integer :: from, to
    call MPI_Cart_shift(plane, direction, way, from, to, ierr)
    call MPI_Sendrecv(cells(1), 1, MPI_DOUBLE_PRECISION, to, 0, cells(0), 1, &
                      MPI_DOUBLE_PRECISION, from, 0, plane, MPI_STATUS_IGNORE, ierr)
  end subroutine side

  subroutine relax(seconds)
    real(8), intent(in) :: seconds
    real(8) :: began
    began = MPI_Wtime()
    do while (MPI_Wtime() - began < seconds)
      before = cells
      cells(1:99) = 0.25d0 * (before(0:98) + 2 * before(1:99) + before(2:100))
    end do
  end subroutine relax
end program halo
