package pki

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"
	"uuid"
)

func TestPublicCertificateFollowsItsFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "public.pem")
	write := func(t *testing.T, at time.Time, content []byte) {
		t.Helper()
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(file, at, at); err != nil {
			t.Fatal(err)
		}
	}
	pem := func(t *testing.T, now time.Time) ([]byte, *Identity) {
		t.Helper()
		d, err := OpenDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		id, err := NewPortIdentity(uuid.New(), nil, now)
		if err != nil {
			t.Fatal(err)
		}
		if err := id.Save(d, "new.pem"); err != nil {
			t.Fatal(err)
		}
		data, err := d.ReadKey("new.pem")
		if err != nil {
			t.Fatal(err)
		}
		return data, id
	}
	synctest.Test(t, func(t *testing.T) {
		first, firstID := pem(t, time.Now())
		write(t, time.Now(), first)
		config, err := PublicPort(file, file, nil)
		if err != nil {
			t.Fatal(err)
		}
		served := func(want *Identity) {
			t.Helper()
			c, err := config.GetCertificate(nil)
			if err != nil || SPKI(c.Leaf) != want.SPKI() {
				t.Fatalf("serves another certificate, %v", err)
			}
		}
		served(firstID)
		write(t, time.Now().Add(time.Second), []byte("damaged"))
		<-time.After(publicCheckEvery)
		served(firstID)
		second, secondID := pem(t, time.Now())
		write(t, time.Now().Add(2*time.Second), second)
		served(firstID) // not looked at before the interval is over
		<-time.After(publicCheckEvery)
		served(secondID)
	})
}
