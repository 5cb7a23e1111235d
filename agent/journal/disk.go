package journal

import (
	"errors"
	"fmt"
	"os"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"
)

// lockTimeout is how long another process may hold the file. Without it bbolt
// would wait for ever.
const lockTimeout = 2 * time.Second

// errLocked says that another process has the journal open.
var errLocked = errors.New("another process holds the journal: is a second bcd running with this data directory?")

// disk is the store in a bbolt file.
type disk struct {
	db        *bolt.DB
	allocated int64 // bytes of the file that surely have blocks
}

// openDisk opens or creates the file. The freelist stays synced
// (NoFreelistSync false): without it, damaged pages panic on a goroutine of
// bbolt's own, which nothing can recover.
func openDisk(path string, readOnly bool) (*disk, error) {
	db, err := bolt.Open(path, 0o600, &bolt.Options{
		Timeout:         lockTimeout,
		ReadOnly:        readOnly,
		PreLoadFreelist: true,
		FreelistType:    bolt.FreelistMapType,
		MaxSize:         MaxBytes,
		NoStatistics:    true,
	})
	if errors.Is(err, berrors.ErrTimeout) {
		return nil, fmt.Errorf("%s: %w", path, errLocked)
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	db.AllocSize = allocBytes
	return &disk{db: db}, nil
}

func (d *disk) commit(changes []change) error {
	err := d.db.Update(func(tx *bolt.Tx) error {
		for _, c := range changes {
			b, err := tx.CreateBucketIfNotExists([]byte(c.bucket))
			if err != nil {
				return err
			}
			if c.value == nil {
				err = b.Delete([]byte(c.key))
			} else {
				err = b.Put([]byte(c.key), c.value)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	if errors.Is(err, berrors.ErrMaxSizeReached) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("%w: %w", ErrFull, err)
	}
	return err
}

func (d *disk) get(bucket, key string) (value []byte, err error) {
	err = d.db.View(func(tx *bolt.Tx) error {
		if b := tx.Bucket([]byte(bucket)); b != nil {
			value = append(value, b.Get([]byte(key))...)
		}
		return nil
	})
	return value, err
}

func (d *disk) each(bucket string, f func(key, value []byte) error) error {
	return d.db.View(func(tx *bolt.Tx) error {
		b := tx.Bucket([]byte(bucket))
		if b == nil {
			return nil
		}
		return b.ForEach(func(k, v []byte) error {
			if v == nil {
				return fmt.Errorf("bucket %s holds a bucket %q", bucket, k)
			}
			return f(k, v)
		})
	})
}

// reserve gives the file blocks for room bytes beyond what is written, so that
// a disk that others fill cannot swallow an outcome. bbolt writes with pwrite
// at the end of what it uses; blocks that are there already cannot run out.
func (d *disk) reserve(room int64) error {
	var used int64
	err := d.db.View(func(tx *bolt.Tx) error { used = tx.Size(); return nil })
	if err != nil {
		return err
	}
	// Half as much again for pages that are not full, and two steps for the
	// copies that a transaction makes.
	want := min(used+room+room/2+2*allocBytes, MaxBytes)
	want = (want + allocBytes - 1) / allocBytes * allocBytes
	if want <= d.allocated {
		return nil
	}
	f, err := os.OpenFile(d.db.Path(), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, want)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = nil // a file system without it: the write itself will tell
	}
	if err != nil {
		return fmt.Errorf("reserve %d bytes for %s: %w", want, d.db.Path(), err)
	}
	d.allocated = want
	return nil
}

func (d *disk) fileBytes() int64 {
	info, err := os.Stat(d.db.Path())
	if err != nil {
		return 0
	}
	return info.Size()
}

func (d *disk) close() error { return d.db.Close() }
