! SPDX-License-Identifier: LGPL-3.0-or-later
!
! Calls MPI from Fortran a known number of times, on an even number of ranks. Compiled
! three times: with -DF08 for `use mpi_f08`, with -DMPIFH for mpif.h, else for `use mpi`. The
! calls, each as often as its line says, are those that the test expects.
#if defined(F08)
#define COMM type(MPI_Comm)
#define REQUEST type(MPI_Request)
#define WINDOW type(MPI_Win)
#define FILE type(MPI_File)
#define STATUS type(MPI_Status)
#define ONE
#define MANY (2)
#else
#define COMM integer
#define REQUEST integer
#define WINDOW integer
#define FILE integer
#define STATUS integer
#define ONE (MPI_STATUS_SIZE)
#define MANY (MPI_STATUS_SIZE, 2)
#endif
program counts
#if defined(F08)
  use mpi_f08
  implicit none
#elif defined(MPIFH)
  implicit none
  include 'mpif.h'
#else
  use mpi
  implicit none
#endif
  integer :: rank, peer, ierr, i, out(1), in(1), total
  logical :: flag
  COMM :: half
  REQUEST :: requests(2)
  STATUS :: s ONE
  STATUS :: ss MANY
  WINDOW :: win
  FILE :: fh
  integer(MPI_ADDRESS_KIND) :: bytes
  integer(MPI_OFFSET_KIND) :: at
  character(len=1024) :: dir

  call MPI_Init(ierr)
  call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierr)
  peer = ieor(rank, 1)
  out(1) = rank
  total = 0
  do i = 1, 5
    if (rank < peer) then
      call MPI_Send(out, 1, MPI_INTEGER, peer, 1, MPI_COMM_WORLD, ierr)
      call MPI_Recv(in, 1, MPI_INTEGER, peer, 2, MPI_COMM_WORLD, s, ierr)
    else
      call MPI_Recv(in, 1, MPI_INTEGER, peer, 1, MPI_COMM_WORLD, s, ierr)
      call MPI_Send(out, 1, MPI_INTEGER, peer, 2, MPI_COMM_WORLD, ierr)
    end if
    total = total + in(1)
    call MPI_Irecv(in, 1, MPI_INTEGER, peer, 3, MPI_COMM_WORLD, requests(1), ierr)
    call MPI_Isend(out, 1, MPI_INTEGER, peer, 3, MPI_COMM_WORLD, requests(2), ierr)
    call MPI_Waitall(2, requests, ss, ierr)
    call MPI_Wait(requests(1), s, ierr)
    call MPI_Test(requests(1), flag, s, ierr)
    call MPI_Sendrecv(out, 1, MPI_INTEGER, peer, 4, in, 1, MPI_INTEGER, peer, 4, &
                      MPI_COMM_WORLD, s, ierr)
    call MPI_Iprobe(peer, 99, MPI_COMM_WORLD, flag, s, ierr)
    call MPI_Barrier(MPI_COMM_WORLD, ierr)
    call MPI_Bcast(in, 1, MPI_INTEGER, 0, MPI_COMM_WORLD, ierr)
    call MPI_Allreduce(out, in, 1, MPI_INTEGER, MPI_SUM, MPI_COMM_WORLD, ierr)
    total = total + in(1)
    call MPI_Pcontrol(1)
  end do
  call MPI_Comm_split(MPI_COMM_WORLD, mod(rank, 2), rank, half, ierr)
  call MPI_Allreduce(out, in, 1, MPI_INTEGER, MPI_SUM, half, ierr)
  call MPI_Comm_free(half, ierr)
  bytes = 4
  call MPI_Win_create(out, bytes, 4, MPI_INFO_NULL, MPI_COMM_WORLD, win, ierr)
  call MPI_Win_fence(0, win, ierr)
  call MPI_Win_free(win, ierr)
  call get_command_argument(1, dir)
  call MPI_File_open(MPI_COMM_WORLD, trim(dir)//'/fortran.data', &
                     MPI_MODE_CREATE + MPI_MODE_RDWR + MPI_MODE_DELETE_ON_CLOSE, &
                     MPI_INFO_NULL, fh, ierr)
  at = 4 * rank
  call MPI_File_set_view(fh, at, MPI_INTEGER, MPI_INTEGER, 'native', MPI_INFO_NULL, ierr)
  call MPI_File_write_all(fh, out, 1, MPI_INTEGER, s, ierr)
  call MPI_File_close(fh, ierr)
  call MPI_Finalize(ierr)
  print '(i0,a,i0)', rank, ' result ', total
end program counts
