package auth_test

import (
	"errors"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headgate/internal/auth"
	"headgate/internal/fault"
)

// took gives the answer to a request and how long it took.
func took(s *auth.Service, r *http.Request) (auth.Principal, time.Duration, error) {
	began := time.Now()
	p, err := s.Authenticate(r)
	return p, time.Since(began), err
}

func TestNobodyHangsOnASilentDatabase(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, st := newService(t, auth.Config{})
		_, seen := newToken(t, s, auth.Admin)
		_, unseen := newToken(t, s, auth.Viewer)
		if _, err := s.Authenticate(bearer(t, seen)); err != nil {
			t.Fatal(err)
		}
		end := st.Silence()
		defer end()
		time.Sleep(10 * time.Second)
		if _, d, err := took(s, bearer(t, unseen)); fault.CodeOf(err) != "credentials_unavailable" || d > auth.DefaultLookupTerm {
			t.Errorf("a token never seen: %v after %v", err, d)
		}
		time.Sleep(2 * time.Second)
		if p, d, err := took(s, bearer(t, seen)); err != nil || p.Role != auth.Admin || d > auth.DefaultLookupTerm/4 {
			t.Errorf("a token seen before: %+v, %v after %v", p, err, d)
		}
		if _, d, err := took(s, bearer(t, seen)); err != nil || d != 0 {
			t.Errorf("the next request: %v after %v, want an answer at once", err, d)
		}
		time.Sleep(auth.DefaultStaleTerm)
		if _, _, err := took(s, bearer(t, seen)); fault.CodeOf(err) != "credentials_unavailable" {
			t.Errorf("after the bound: %v", err)
		}
	})
}

func TestManyCallersShareOneLookup(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, st := newService(t, auth.Config{})
		_, secret := newToken(t, s, auth.Admin)
		end := st.Silence()
		errs := make([]error, 500)
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() { _, errs[i] = s.Authenticate(bearer(t, secret)) })
		}
		time.Sleep(time.Second)
		end() // within what a caller waits
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Error(err)
		}
		if n := st.Lookups(); n != 1 {
			t.Errorf("%d lookups, want 1", n)
		}
	})
}

// The promise of a second holds as soon as the database answers again, also
// when a lookup of the silent time never comes back.
func TestARevocationHoldsWhenTheDatabaseAnswersAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, st := newService(t, auth.Config{})
		tok, secret := newToken(t, s, auth.Admin)
		if _, err := s.Authenticate(bearer(t, secret)); err != nil {
			t.Fatal(err)
		}
		release := st.Silence()
		time.Sleep(10 * time.Second)
		if _, err := s.Authenticate(bearer(t, secret)); err != nil {
			t.Fatalf("while it is silent: %v", err)
		}
		time.Sleep(5 * time.Second)
		st.Silence()() // answers again; the lookup before stays without an answer
		if err := st.RevokeToken(t.Context(), tok.ID); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if _, err := s.Authenticate(bearer(t, secret)); fault.CodeOf(err) != "token_revoked" {
			t.Errorf("a second later: %v", err)
		}
		release()
		synctest.Wait()
		if _, err := s.Authenticate(bearer(t, secret)); fault.CodeOf(err) != "token_revoked" {
			t.Errorf("after the late answer: %v", err)
		}
	})
}

func TestASilentDatabaseKeepsNoCredentialBeyondItsEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, st := newService(t, auth.Config{})
		_, secret, err := s.NewToken(t.Context(), admin(), "short", auth.Viewer, time.Now().Add(time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Authenticate(bearer(t, secret)); err != nil {
			t.Fatal(err)
		}
		defer st.Silence()()
		time.Sleep(time.Minute)
		if _, err := s.Authenticate(bearer(t, secret)); fault.CodeOf(err) != "credentials_unavailable" {
			t.Errorf("got %v", err)
		}
	})
}

func TestAFloodOfUnknownTokensIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, st := newService(t, auth.Config{})
		secrets := make([]string, 1500)
		for i := range secrets {
			_, secrets[i] = newToken(t, s, auth.Viewer)
		}
		end := st.Silence()
		var mu sync.Mutex
		atOnce := 0
		var wg sync.WaitGroup
		for _, secret := range secrets {
			wg.Go(func() {
				_, d, err := took(s, bearer(t, secret))
				mu.Lock()
				defer mu.Unlock()
				if fault.CodeOf(err) != "credentials_unavailable" || d > auth.DefaultLookupTerm {
					t.Errorf("%v after %v", err, d)
				}
				if d == 0 {
					atOnce++
				}
			})
		}
		wg.Wait()
		if atOnce == 0 {
			t.Error("every caller waited")
		}
		end()
	})
}
