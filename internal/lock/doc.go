// Package lock makes one process the owner of a database.
//
// # Model
//
// Ownership of app.db is an OS lock on app.db.lock, held for life. The kernel
// releases it when the process ends, however it ends, so a successor starts at
// once; there is no lease to run out, because a SQLite file has one machine.
// app.db.owner says who holds it. That file outlives a killed owner, so it is
// believed only while the lock is held.
//
// # Invariants, each with its guard
//
//  1. At most one Lock per database exists, also when it is reached through a
//     symbolic link (TestSecondOwner, TestSymlink).
//  2. A killed owner is succeeded at once (TestSuccessorOfKilled).
//  3. Looking whether there is an owner never keeps one from starting
//     (TestHolderDoesNotDisturb).
//
// The lock file is never removed: two processes would lock two files of the
// same name.
package lock
