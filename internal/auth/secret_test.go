package auth

import (
	"bytes"
	"math/big"
	"testing"

	"pgregory.net/rapid"
)

func TestTokenSecretsHaveTheAgreedForm(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for range 200 {
		s := newTokenSecret()
		if len(s) != tokenLength || !wellFormed(s) {
			t.Fatalf("secret of length %d is not well formed", len(s))
		}
		if seen[s] {
			t.Fatal("the same secret twice")
		}
		seen[s] = true
	}
}

func TestOneWrongCharacterIsNoticed(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := []byte(newTokenSecret())
		at := rapid.IntRange(0, len(s)-1).Draw(t, "at")
		c := base62[rapid.IntRange(0, 61).Draw(t, "char")]
		if s[at] == c {
			return
		}
		s[at] = c
		if wellFormed(string(s)) {
			t.Fatalf("changed character %d was not noticed", at)
		}
	})
}

func TestEncode62IsBase62(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		raw := rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, "raw")
		text := encode62(raw, tokenBody)
		back := new(big.Int)
		for _, c := range []byte(text) {
			back.Mul(back, big.NewInt(62))
			back.Add(back, big.NewInt(int64(bytes.IndexByte([]byte(base62), c))))
		}
		if want := new(big.Int).SetBytes(raw); back.Cmp(want) != 0 {
			t.Fatalf("%x came back as %x", want, back)
		}
	})
}
