package auth

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"uuid"

	"headgate/internal/fault"
)

// ReadTokenFile gives the token in a file, making file and token when there
// is none. It needs no database, so that a start can prepare the file early.
func ReadTokenFile(path string) (string, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return makeTokenFile(path)
	}
	if err != nil {
		return "", fmt.Errorf("look at token file: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return "", fault.Newf(fault.Invalid, "token_file_mode", "The token file %s can be read by others (mode %#o).", path, info.Mode().Perm()).
			WithHint("Run chmod 600 on it, or remove it so that a new token is made.")
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("read token file: %w", err)
	}
	secret := strings.TrimSpace(string(raw))
	if !wellFormed(secret) {
		return "", fault.Newf(fault.Invalid, "token_file_content", "The file %s does not hold an API token.", path).
			WithHint("Put a token that begins with hgt_ into it, or remove it so that a new one is made.")
	}
	return secret, nil
}

// makeTokenFile writes a new token under a temporary name and links it into
// place, so that a half written file is never read and of two programs that
// start together both get the same token.
func makeTokenFile(path string) (string, error) {
	secret := newTokenSecret()
	f, err := os.CreateTemp(filepath.Dir(path), ".token-*") // mode 0600
	if err != nil {
		return "", fmt.Errorf("make token file: %w", err)
	}
	defer func() { _ = os.Remove(f.Name()) }()
	_, err = f.WriteString(secret + "\n")
	err = errors.Join(err, f.Sync(), f.Close())
	if err != nil {
		return "", fmt.Errorf("write token file: %w", err)
	}
	err = os.Link(f.Name(), path)
	if errors.Is(err, fs.ErrExist) {
		return ReadTokenFile(path)
	}
	if err != nil {
		return "", fmt.Errorf("place token file: %w", err)
	}
	return secret, nil
}

// EnsureTokenFile reads the token file, or makes it, and registers its token.
// A token that was revoked stays revoked: the answer is then an error that
// says so. While the database is away, such a token goes on working here.
func (s *Service) EnsureTokenFile(ctx context.Context, path, name string, role Role) (Token, error) {
	secret, err := ReadTokenFile(path)
	if err != nil {
		return Token{}, err
	}
	t, err := s.cfg.Store.EnsureToken(ctx, Token{
		ID: uuid.NewV7(), Name: name, Role: role, Hash: hashOf(secret), CreatedAt: s.now(), CreatedBy: "file",
	})
	if err != nil {
		return Token{}, fmt.Errorf("register token file: %w", err)
	}
	if err := usable(t, s.now()); err != nil {
		return Token{}, fault.Newf(fault.Invalid, "token_file_revoked", "The token in %s has been revoked or has expired.", path).
			WithHint("Remove the file and start again; a new token is then made.")
	}
	s.cache.keep(t.Hash, principalOf(t))
	return t, nil
}

// KeepTokenFile lets the token of this controller's own file work before the
// database has ever answered. It makes the file when there is none.
func (s *Service) KeepTokenFile(path, name string, role Role) error {
	secret, err := ReadTokenFile(path)
	if err != nil {
		return err
	}
	s.cache.keep(hashOf(secret), Principal{Kind: KindToken, Name: name, Role: role})
	return nil
}
