package admission

import (
	"cmp"
	"net/netip"
	"slices"
	"time"
)

const (
	// MaxSources bounds a table of sources, and with it memory.
	MaxSources = 1 << 16
	// SiteFactor is how much more than one source all sources of a /48 may do
	// together, and all that found no place in a full table.
	SiteFactor = 8
	// KnownFor is how long a source stays known after a login.
	KnownFor = 24 * time.Hour
	// keepShown is how long an idle source is kept so that it can be looked at.
	keepShown = 10 * time.Minute
	// tries bounds the search for an idle source whose place is taken over.
	tries = 8
)

// SourceRates says what one source may do.
type SourceRates struct {
	Source Rate
	Known  float64 // factor for known sources
}

// Source is what is known of one source. Its fields belong to Sources.
type Source struct {
	key    Key
	bucket Bucket
	site   *Source // nil for IPv4, for a site itself and for the overflow
	uses   int     // sources that have this as their site
	factor float64 // 1, or SiteFactor

	conns      int // held and not yet charged to an identity
	busy       int // between Begin and End
	knownUntil time.Time
	listed     bool   // SetKnown names it
	listGen    uint64 // for which list that holds
	touched    time.Time

	refused   uint64 // since the source is in the table
	untold    uint64 // of them not yet taken by TakeRefusals
	untoldWhy string
	older     *Source // by touched
	newer     *Source
}

// SourceView is one source as an operator wants to see it.
type SourceView struct {
	Key     Key
	Conns   int
	Refused uint64
	Known   bool
	// Overflow marks the sum of all that found no place in the table.
	Overflow bool
}

// RefusalView is what was refused of one source since it was last told.
type RefusalView struct {
	Key Key
	// Overflow marks the sum of all that found no place in the table.
	Overflow bool
	Count    uint64
	Why      string // the last reason
}

// Sources is a bounded table of sources. When it is full and holds no idle one,
// new keys share one overflow source with SiteFactor times the rate: neither
// memory nor a free pass can be had by many addresses. Sources that SetKnown
// names have an eighth of the table more to themselves. Make it by NewSources.
type Sources struct {
	max      int
	rates    SourceRates
	table    map[Key]*Source
	overflow Source
	overs    uint64 // how often a key was given the overflow

	oldest, newest *Source // by touched

	known    map[netip.Prefix]struct{}
	bits     []int // prefix lengths within known
	knownGen uint64

	untold     []*Source // with refusals that nobody was told of, bounded
	untoldRest uint64    // refusals of those beyond the bound
}

// NewSources makes a table of at most limit sources; 0 stands for MaxSources.
func NewSources(limit int, rates SourceRates) *Sources {
	if limit <= 0 {
		limit = MaxSources
	}
	return &Sources{
		max: limit, rates: rates, table: make(map[Key]*Source),
		overflow: Source{factor: SiteFactor},
	}
}

// SetRates changes what a source may do. What each has in its bucket counts by
// the old rates until now and is not raised.
func (t *Sources) SetRates(now time.Time, rates SourceRates) {
	for s := t.oldest; s != nil; s = s.newer {
		s.bucket.Settle(now, t.rateOf(now, s))
	}
	t.overflow.bucket.Settle(now, t.rateOf(now, &t.overflow))
	t.rates = rates
}

// SetKnown replaces the list of known addresses.
func (t *Sources) SetKnown(list []netip.Prefix) {
	t.known, t.bits = make(map[netip.Prefix]struct{}, len(list)), nil
	t.knownGen++
	for _, p := range list {
		if !p.IsValid() {
			continue
		}
		p = normal(p)
		t.known[p] = struct{}{}
		if !slices.Contains(t.bits, p.Bits()) {
			t.bits = append(t.bits, p.Bits())
		}
	}
}

// normal writes a prefix as keys are written: without the ways to wrap an IPv4
// address, and not narrower than a source.
func normal(p netip.Prefix) netip.Prefix {
	addr, bits := p.Addr().WithZone(""), p.Bits()
	if inner := unwrap(addr); inner.Is4() && !addr.Is4() && bits >= wrapBits {
		addr, bits = inner, bits-wrapBits
	}
	if addr.Is6() {
		bits = min(bits, keyBits)
	}
	return netip.PrefixFrom(addr, bits).Masked()
}

// Get gives the source of a key, made at its first use.
func (t *Sources) Get(now time.Time, key Key) *Source {
	s := t.table[key]
	if s == nil {
		if s = t.insert(now, key, 1); s == nil {
			t.overs++
			return &t.overflow
		}
		t.joinSite(now, s)
	}
	t.touch(now, s)
	return s
}

// joinSite gives s its /48, and the overflow if that finds no place.
func (t *Sources) joinSite(now time.Time, s *Source) {
	at := s.key.Site()
	if at == s.key {
		return
	}
	site := t.table[at]
	if site == nil {
		s.uses++ // s is new and idle: it must not make room for its own site
		site = t.insert(now, at, SiteFactor)
		s.uses--
	}
	if site == nil {
		site = &t.overflow
	}
	site.uses++
	s.site = site
}

// Known reports whether the source is named by SetKnown or had a login within
// KnownFor. Peers without an address are programs of this machine.
func (t *Sources) Known(now time.Time, s *Source) bool {
	if now.Before(s.knownUntil) {
		return true
	}
	if s == &t.overflow || s.factor != 1 {
		return false
	}
	if s.listGen != t.knownGen {
		s.listed, s.listGen = t.contains(s.key), t.knownGen
	}
	return s.listed || s.key.IsZero()
}

func (t *Sources) contains(k Key) bool {
	for _, bits := range t.bits {
		if p, err := k.net.Addr().Prefix(bits); err == nil && bits <= k.net.Bits() {
			if _, ok := t.known[p]; ok {
				return true
			}
		}
	}
	return false
}

// Login notes that somebody has proved who they are from this source.
func (t *Sources) Login(now time.Time, s *Source) {
	if s != &t.overflow { // which would make strangers known
		s.knownUntil = now.Add(KnownFor)
	}
}

// rateOf gives what a source may do now.
func (t *Sources) rateOf(now time.Time, s *Source) Rate {
	f := s.factor
	if t.Known(now, s) {
		f *= max(t.rates.Known, 1)
	}
	return t.rates.Source.Times(f)
}

// siteOf gives the site whose bucket s is held to as well; known sources are
// held to their own alone.
func (t *Sources) siteOf(now time.Time, s *Source) *Source {
	if s.site == nil || t.Known(now, s) {
		return nil
	}
	return s.site
}

// Take takes a token of the source, and one of its site, if both have one.
func (t *Sources) Take(now time.Time, s *Source) bool {
	rate := t.rateOf(now, s)
	if !s.bucket.Take(now, rate, 1) {
		return false
	}
	if site := t.siteOf(now, s); site != nil && !site.bucket.Take(now, t.rateOf(now, site), 1) {
		s.bucket.Give(now, rate, 1)
		return false
	}
	return true
}

// ReadyAt gives the moment at which Take can succeed, the zero time for never.
func (t *Sources) ReadyAt(now time.Time, s *Source) time.Time {
	at := s.bucket.ReadyAt(now, t.rateOf(now, s), 1)
	if site := t.siteOf(now, s); site != nil && !at.IsZero() {
		other := site.bucket.ReadyAt(now, t.rateOf(now, site), 1)
		if other.IsZero() || other.After(at) {
			return other
		}
	}
	return at
}

// Give puts a token back, for one who turned out to be no stranger or gone.
func (t *Sources) Give(now time.Time, s *Source) {
	s.bucket.Give(now, t.rateOf(now, s), 1)
	if site := t.siteOf(now, s); site != nil {
		site.bucket.Give(now, t.rateOf(now, site), 1)
	}
}

// Charge takes n tokens for harm done, into debt if they are not there.
func (t *Sources) Charge(now time.Time, s *Source, n float64) {
	s.bucket.Charge(now, t.rateOf(now, s), n)
	if site := t.siteOf(now, s); site != nil {
		site.bucket.Charge(now, t.rateOf(now, site), n)
	}
}

// Hold notes a connection of the source if it has less than limit times its
// factor; 0 is no limit.
func (t *Sources) Hold(s *Source, limit int) bool {
	if limit > 0 && s.conns >= limit*int(s.factor) {
		return false
	}
	s.conns++
	return true
}

// Release notes that a connection has ended or is charged to another.
func (t *Sources) Release(s *Source) { s.conns-- }

// CanBegin reports whether the source has less than limit times its factor
// under way; 0 is no limit.
func (t *Sources) CanBegin(s *Source, limit int) bool {
	return limit <= 0 || s.busy < limit*int(s.factor)
}

// Begin notes that work for the source begins, End that it has ended.
func (t *Sources) Begin(s *Source) { s.busy++ }

// End notes that work for the source has ended.
func (t *Sources) End(s *Source) { s.busy-- }

// maxUntold bounds the sources that one summary of refusals names.
const maxUntold = 32

// Refuse counts a refused connection of the source.
func (t *Sources) Refuse(s *Source, why string) {
	s.refused++
	switch {
	case s.untold > 0:
	case len(t.untold) < maxUntold:
		t.untold = append(t.untold, s)
	default:
		t.untoldRest++
		return
	}
	s.untold++
	s.untoldWhy = why
}

// TakeRefusals gives what was refused since the last call: by source, and the
// sum of the sources beyond the first few.
func (t *Sources) TakeRefusals() (list []RefusalView, rest uint64) {
	for _, s := range t.untold {
		list = append(list, RefusalView{Key: s.key, Overflow: s == &t.overflow, Count: s.untold, Why: s.untoldWhy})
		s.untold = 0
	}
	rest = t.untoldRest
	t.untold, t.untoldRest = t.untold[:0], 0
	return list, rest
}

// Len gives the number of sources in the table.
func (t *Sources) Len() int { return len(t.table) }

// Overflows gives how often a key found no place.
func (t *Sources) Overflows() uint64 { return t.overs }

// Top gives the n (at least one) sources with most refusals, then most connections, the
// overflow among them.
func (t *Sources) Top(now time.Time, n int) []SourceView {
	var top []SourceView
	add := func(s *Source) {
		v := SourceView{Key: s.key, Conns: s.conns, Refused: s.refused}
		if s.conns == 0 && s.refused == 0 || len(top) == n && compareViews(v, top[n-1]) >= 0 {
			return // as nearly all of a full table
		}
		v.Known, v.Overflow = t.Known(now, s), s == &t.overflow
		at, _ := slices.BinarySearchFunc(top, v, compareViews)
		top = slices.Insert(top, at, v)
		top = top[:min(len(top), n)]
	}
	add(&t.overflow)
	for s := t.newest; s != nil; s = s.older {
		add(s)
	}
	return top
}

func compareViews(a, b SourceView) int {
	return cmp.Or(cmp.Compare(b.Refused, a.Refused), cmp.Compare(b.Conns, a.Conns))
}

// insert makes a place for key; nil when there is none to be had.
func (t *Sources) insert(now time.Time, key Key, factor float64) *Source {
	t.sweep(now)
	limit := t.max
	if factor == 1 && t.contains(key) {
		limit += t.max / 8
	}
	if len(t.table) >= limit && !t.evict(now) {
		return nil
	}
	s := &Source{key: key, factor: factor}
	t.table[key] = s
	t.link(now, s)
	return s
}

// sweep gives up to two sources back that nobody will want to look at.
func (t *Sources) sweep(now time.Time) {
	for range 2 {
		if s := t.oldest; s == nil || now.Sub(s.touched) < keepShown || !t.reconsider(now, s) {
			return
		}
	}
}

// evict takes the place of an idle source among the oldest.
func (t *Sources) evict(now time.Time) bool {
	for range tries {
		if t.reconsider(now, t.oldest) {
			return true
		}
	}
	return false
}

// reconsider drops a source that is as good as new. One that is not goes to
// the end of the line, so that the next search looks at others.
func (t *Sources) reconsider(now time.Time, s *Source) bool {
	idle := s.conns == 0 && s.busy == 0 && s.uses == 0 && s.untold == 0 && !now.Before(s.knownUntil) && s.bucket.Full(now, t.rateOf(now, s))
	t.unlink(s)
	if !idle {
		t.link(now, s)
		return false
	}
	delete(t.table, s.key)
	if s.site != nil {
		s.site.uses--
	}
	return true
}

func (t *Sources) touch(now time.Time, s *Source) {
	if t.newest != s {
		t.unlink(s)
		t.link(now, s)
	}
	s.touched = now
}

func (t *Sources) link(now time.Time, s *Source) {
	s.touched, s.older, s.newer = now, t.newest, nil
	if t.newest != nil {
		t.newest.newer = s
	} else {
		t.oldest = s
	}
	t.newest = s
}

func (t *Sources) unlink(s *Source) {
	if s.older != nil {
		s.older.newer = s.newer
	} else {
		t.oldest = s.newer
	}
	if s.newer != nil {
		s.newer.older = s.older
	} else {
		t.newest = s.older
	}
}
