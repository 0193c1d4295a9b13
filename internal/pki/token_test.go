package pki_test

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"headgate/internal/fault"
	"headgate/internal/pki"
)

func TestTokenSurvivesItsText(t *testing.T) {
	t.Parallel()
	token := pki.NewToken(pki.Fingerprint{1, 2, 3})
	text := token.Reveal()
	if len(text) != 100 || !strings.HasPrefix(text, "hg1_") {
		t.Fatalf("%d characters: the hint of ParseToken promises 100", len(text))
	}
	for _, spelling := range []string{text, text + "\n", "  " + text + "\r\n"} {
		got, err := pki.ParseToken(spelling)
		if err != nil || *got != *token {
			t.Fatalf("%v", err)
		}
	}
	token.Zero()
	if *token.Secret() != (pki.Secret{}) {
		t.Fatal("the secret is still there")
	}
}

func TestTokenRefusesOtherText(t *testing.T) {
	t.Parallel()
	text := pki.NewToken(pki.Fingerprint{}).Reveal()
	for _, bad := range []string{
		"", "hg1_", text[:99], text + "A", text[4:], "HG1_" + text[4:], "hg2_" + text[4:],
		text[:50] + "\n" + text[50:], text[:50] + "+" + text[51:], text + "=", strings.Repeat(" ", 1000) + text,
	} {
		_, err := pki.ParseToken(bad)
		if fault.CodeOf(err) != "invalid_enrolment_token" || fault.KindOf(err) != fault.Invalid {
			t.Errorf("%q: %v", bad, err)
		}
		if len(bad) > 4 && strings.Contains(err.Error(), bad) {
			t.Error("the fault repeats the token")
		}
	}
}

func TestTokenIsMaskedWhereverItIsPrinted(t *testing.T) {
	t.Parallel()
	token := pki.NewToken(pki.Fingerprint{})
	var out bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		fmt.Fprintf(&out, verb+verb+verb+verb+"\n", token, *token, token.Secret(), *token.Secret())
	}
	slog.New(slog.NewJSONHandler(&out, nil)).Info("x", "token", token, "value", *token, "secret", token.Secret(), "group", struct{ T *pki.Token }{token})
	slog.New(slog.NewTextHandler(&out, nil)).Info("x", "token", token, "value", *token, "secret", *token.Secret())
	secret := *token.Secret()
	for _, leak := range []string{token.Reveal()[50:60], hex.EncodeToString(secret[:4]), fmt.Sprintf("%v", secret[:3]), strings.Trim(fmt.Sprintf("%v", secret[:3]), "[]")} {
		if strings.Contains(out.String(), leak) {
			t.Fatalf("%q is in:\n%s", leak, out.String())
		}
	}
	if _, err := json.Marshal(token); err == nil {
		t.Fatal("a token was written into a document")
	}
}

func FuzzParseToken(f *testing.F) {
	f.Add(pki.NewToken(pki.Fingerprint{}).Reveal())
	f.Add("hg1_")
	f.Add("hg1_" + strings.Repeat("_", 96))
	f.Fuzz(func(t *testing.T, text string) {
		token, err := pki.ParseToken(text)
		if err != nil {
			return
		}
		if got := token.Reveal(); got != strings.TrimSpace(text) {
			t.Fatalf("%q has the second spelling %q", got, text)
		}
	})
}
