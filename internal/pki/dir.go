package pki

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"sync"
	"syscall"

	"headgate/internal/fault"
)

const (
	// fileMode is the mode of every file in a state folder: a certificate is
	// public, but one rule without exceptions is easier to audit.
	fileMode fs.FileMode = 0o600
	dirMode  fs.FileMode = 0o700
	// othersMask are the mode bits that let anybody but the owner at a file.
	othersMask fs.FileMode = 0o077
	// maxFileSize bounds what is read into memory; the largest real file, a
	// bundle of certificates, has a few kilobytes.
	maxFileSize = 1 << 20
)

// Dir is a state folder for keys and certificates. Names are slash separated
// and cannot leave the folder, not even through a symbolic link. A Dir may be
// used by several goroutines of one process; that only one process uses it is
// for the owner of the folder to ensure with a lock.
type Dir struct {
	root *os.Root
	path string
	mu   sync.Mutex // serializes writers, which share the temporary name
}

// OpenDir opens the folder and makes it (0700) when it does not exist.
func OpenDir(name string) (*Dir, error) {
	abs, err := filepath.Abs(name)
	if err != nil {
		return nil, stateFault(err, "state_dir_unusable", "The state folder cannot be resolved.")
	}
	if err := os.MkdirAll(abs, dirMode); err != nil {
		return nil, stateFault(err, "state_dir_unusable", "The state folder "+abs+" cannot be made.")
	}
	root, err := os.OpenRoot(abs)
	if err != nil {
		return nil, stateFault(err, "state_dir_unusable", "The state folder "+abs+" cannot be opened.")
	}
	return &Dir{root: root, path: abs}, nil
}

// Path gives the absolute path of the folder.
func (d *Dir) Path() string { return d.path }

// Close releases the folder.
func (d *Dir) Close() error { return d.root.Close() }

// Write stores data under name so that after a crash at any instant the file
// holds either the old or the new content, never a part. It returns only when
// the content and the directory entries that lead to it are on disk.
func (d *Dir) Write(name string, data []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.write(path.Clean(name), data); err != nil {
		return stateFault(err, "state_write_failed", "The file "+d.file(name)+" cannot be written.")
	}
	return nil
}

func (d *Dir) write(name string, data []byte) error {
	parent, base := path.Split(name)
	parent = path.Clean(parent)
	if err := d.root.MkdirAll(parent, dirMode); err != nil {
		return err
	}
	// A fixed temporary name means that a crash leaves at most one stray file,
	// which the next write takes away; removing it first also gets rid of a
	// wrong mode that an existing file would keep.
	tmp := path.Join(parent, "."+base+".tmp")
	if err := d.root.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := d.writeSynced(tmp, data); err != nil {
		return errors.Join(err, d.root.Remove(tmp))
	}
	if err := d.root.Rename(tmp, name); err != nil {
		return errors.Join(err, d.root.Remove(tmp))
	}
	return d.syncUpwards(parent)
}

func (d *Dir) writeSynced(name string, data []byte) (err error) {
	f, err := d.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, fileMode)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := f.Write(data); err != nil {
		return err
	}
	return f.Sync()
}

// syncUpwards makes the directory entries durable from dir up to the root of
// the folder, since Write may just have made some of those directories.
func (d *Dir) syncUpwards(dir string) error {
	for {
		f, err := d.root.Open(dir)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			return err
		}
		if dir == "." {
			return nil
		}
		dir = path.Dir(dir)
	}
}

// Read gives the content of a file that holds no secret. A missing file is a
// fault of kind NotFound that also matches fs.ErrNotExist.
func (d *Dir) Read(name string) ([]byte, error) {
	return d.read(name, 0)
}

// ReadKey is Read for a file that holds a secret: it refuses a file that
// anybody but its owner may touch, because such a key must be held for stolen.
func (d *Dir) ReadKey(name string) ([]byte, error) {
	return d.read(name, othersMask)
}

func (d *Dir) read(name string, forbidden fs.FileMode) ([]byte, error) {
	// O_NONBLOCK: a named pipe planted under the name must not hang the start.
	f, err := d.root.OpenFile(path.Clean(name), os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fault.Wrap(err, fault.NotFound, "state_file_missing", "The file "+d.file(name)+" does not exist.")
	}
	if err != nil {
		return nil, stateFault(err, "state_read_failed", "The file "+d.file(name)+" cannot be opened.")
	}
	defer f.Close() // read only: nothing can be lost by a failed close
	info, err := f.Stat()
	if err != nil {
		return nil, stateFault(err, "state_read_failed", "The file "+d.file(name)+" cannot be examined.")
	}
	if !info.Mode().IsRegular() || info.Size() > maxFileSize {
		return nil, fault.Newf(fault.Internal, "state_read_failed", "%s is not a regular file of at most %d bytes.", d.file(name), maxFileSize)
	}
	if mode := info.Mode().Perm(); mode&forbidden != 0 {
		return nil, fault.Newf(fault.Internal, "key_file_exposed",
			"The key file %s has mode %04o, so other users of this machine can get at it.", d.file(name), mode).
			WithHint("Run chmod 600 on the file; if somebody may have read it, replace the key.")
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFileSize))
	if err != nil {
		return nil, stateFault(err, "state_read_failed", "The file "+d.file(name)+" cannot be read.")
	}
	return data, nil
}

// Remove deletes a file durably; a file that does not exist is no error.
func (d *Dir) Remove(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	name = path.Clean(name)
	err := d.root.Remove(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = d.syncUpwards(path.Dir(name))
	}
	if err != nil {
		return stateFault(err, "state_write_failed", "The file "+d.file(name)+" cannot be removed.")
	}
	return nil
}

func (d *Dir) file(name string) string { return filepath.Join(d.path, filepath.FromSlash(name)) }

func stateFault(err error, code, message string) error {
	return fault.Wrap(err, fault.Internal, code, message).
		WithHint("Check that the folder exists, belongs to the user that Headgate runs as, and that the disk is not full.")
}
