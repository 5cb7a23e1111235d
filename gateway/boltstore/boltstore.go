// Package boltstore keeps a gateway's state in one bbolt file.
//
// The file has mode 0600 and one owner at a time: a second process that opens
// it fails within a second instead of waiting. Every transaction is synced to
// the disk before it returns; transactions that arrive together share one sync.
package boltstore

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/better-compute/bcd/gateway"
)

const (
	// batchDelay is how long a lone transaction waits for company. A sync
	// takes longer than this on every disk met, so it costs little and lets
	// thousands of events a second share syncs.
	batchDelay = time.Millisecond
	// openTimeout bounds the wait for another owner of the file.
	openTimeout = time.Second
)

// ErrInUse is returned by Open when another process holds the file.
var ErrInUse = errors.New("in use by another process")

// Store is a gateway.Store in one file.
type Store struct{ db *bolt.DB }

var _ gateway.Store = (*Store)(nil)

// Open opens or makes the store's file. It refuses an empty file, which bbolt
// would take for a new store: that is what a crash of another program, not of
// this one, leaves behind, and starting afresh would forget every node.
func Open(path string) (*Store, error) {
	info, err := os.Stat(path)
	fresh := errors.Is(err, os.ErrNotExist)
	switch {
	case err == nil && info.Size() == 0:
		return nil, fmt.Errorf("store %s is an empty file, which cannot have been written by bcd-gateway; move it aside to start with no state, or restore a copy", path)
	case err != nil && !fresh:
		return nil, fmt.Errorf("store %s: %w", path, err)
	}
	open := path
	if fresh {
		// A crash between creating the file and writing its first pages must
		// not leave the empty file that is refused above.
		open = path + ".new"
		if err := os.Remove(open); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("store %s: %w", open, err)
		}
	}
	s, err := openFile(open)
	if err != nil {
		return nil, err
	}
	if !fresh {
		return s, nil
	}
	if err := s.Close(); err != nil {
		return nil, err
	}
	// Link, not rename: it never replaces a store that another process made in
	// the meantime.
	err = os.Link(open, path)
	os.Remove(open)
	if err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("store %s: %w", path, err)
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return nil, err
	}
	return openFile(path)
}

func openFile(path string) (store *Store, err error) {
	// bbolt maps the file and believes it: a shortened or damaged one is a
	// fault or a panic, here or on the first transaction.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			store, err = nil, damaged(path, p)
		}
	}()
	db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: openTimeout, FreelistType: bolt.FreelistMapType})
	if err != nil {
		if errors.Is(err, bolterrors.ErrTimeout) {
			return nil, fmt.Errorf("store %s: %w; stop the other bcd-gateway first, or use another data directory", path, ErrInUse)
		}
		return nil, fmt.Errorf("open store %s: %w", path, err)
	}
	db.MaxBatchDelay = batchDelay
	info, err := os.Stat(path)
	if err == nil {
		err = db.View(func(tx *bolt.Tx) error {
			if tx.Size() > info.Size() {
				return damaged(path, fmt.Sprintf("it has %d bytes of %d", info.Size(), tx.Size()))
			}
			return nil
		})
	}
	if err != nil {
		db.Close()
		return nil, err
	}
	err = db.Update(func(tx *bolt.Tx) error {
		for _, name := range buckets {
			if _, err := tx.CreateBucketIfNotExists([]byte(name)); err != nil {
				return fmt.Errorf("bucket %s: %w", name, err)
			}
		}
		return nil
	})
	if err != nil {
		db.Close()
		return nil, fmt.Errorf("open store %s: %w", path, err)
	}
	return &Store{db: db}, nil
}

func damaged(path string, why any) error {
	return fmt.Errorf("store %s is damaged: %v; restore a copy of it, or move it aside to start with no state", path, why)
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	err = dir.Sync()
	if closeErr := dir.Close(); err == nil {
		err = closeErr
	}
	return err
}

// Update is gateway.Store's.
func (s *Store) Update(ctx context.Context, fn func(gateway.Tx) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return s.db.Batch(func(tx *bolt.Tx) error { return fn(&txn{tx}) })
}

// View is gateway.Store's.
func (s *Store) View(ctx context.Context, fn func(gateway.Tx) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return s.db.View(func(tx *bolt.Tx) error { return fn(&txn{tx}) })
}

// Close is gateway.Store's.
func (s *Store) Close() error { return s.db.Close() }
