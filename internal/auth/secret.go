package auth

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"hash/crc32"
	"strings"
)

// The form of an API token: a prefix that secret scanners find, 256 random
// bits in base 62, and a checksum that tells a typing error from a revoked
// token without asking the database.
const (
	tokenPrefix   = "hgt_"
	tokenRandom   = 32 // bytes; far beyond guessing, so that a fast hash is right
	tokenBody     = 43 // characters that 32 bytes need in base 62
	tokenChecksum = 6  // characters that a CRC-32 needs in base 62
	tokenLength   = len(tokenPrefix) + tokenBody + tokenChecksum

	base62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
)

// newTokenSecret makes the text of a new API token.
func newTokenSecret() string {
	var raw [tokenRandom]byte
	rand.Read(raw[:]) // never fails: the runtime ends the program instead
	body := encode62(raw[:], tokenBody)
	sum := checksum62(body)
	return tokenPrefix + body + string(sum[:])
}

// wellFormed says whether text has the form of a token with a right checksum.
func wellFormed(text string) bool {
	if len(text) != tokenLength || !strings.HasPrefix(text, tokenPrefix) {
		return false
	}
	body := text[len(tokenPrefix) : len(tokenPrefix)+tokenBody]
	sum := checksum62(body)
	return string(sum[:]) == text[len(tokenPrefix)+tokenBody:]
}

func checksum62(body string) (out [tokenChecksum]byte) {
	sum := crc32.ChecksumIEEE([]byte(body))
	for i := tokenChecksum - 1; i >= 0; i-- {
		out[i] = base62[sum%62]
		sum /= 62
	}
	return out
}

// encode62 writes a big-endian number in base 62 with leading zeros.
func encode62(number []byte, width int) string {
	digits := append([]byte(nil), number...)
	out := make([]byte, width)
	for i := width - 1; i >= 0; i-- {
		rest := 0
		for j, d := range digits {
			rest = rest<<8 | int(d)
			digits[j] = byte(rest / 62)
			rest %= 62
		}
		out[i] = base62[rest]
	}
	return string(out)
}

// newRandomText makes the value of a session cookie or of a sign-in link.
func newRandomText() string {
	var raw [32]byte
	rand.Read(raw[:])
	return base64.RawURLEncoding.EncodeToString(raw[:])
}

func hashOf(secret string) [32]byte { return sha256.Sum256([]byte(secret)) }
