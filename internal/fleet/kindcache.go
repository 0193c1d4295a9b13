package fleet

import (
	"crypto/sha256"
	"encoding/json"
	"sync"

	"google.golang.org/protobuf/proto"

	"headgate/internal/agentpb"
)

const (
	maxKinds    = 256  // of one agent; the product knows a few dozen
	maxPrograms = 1000 // of one kind of one agent
	maxOffers   = 64   // different offers that are kept; a fleet has a handful
)

// kindCache lets agents with the same policy share one list: 10,000 agents
// have a handful of policies.
type kindCache struct {
	mu  sync.Mutex
	all map[[sha256.Size]byte][]KindOffer
}

// offers reads what a Welcome says of kinds. Excess and broken schemas are
// left out; the agent refuses what it does not allow whatever we believe.
func (c *kindCache) offers(infos []*agentpb.KindInfo) []KindOffer {
	sum := sha256.New()
	for _, k := range infos {
		if b, err := (proto.MarshalOptions{Deterministic: true}).Marshal(k); err == nil {
			sum.Write(b)
			sum.Write([]byte{0})
		}
	}
	key := [sha256.Size]byte(sum.Sum(nil))
	c.mu.Lock()
	defer c.mu.Unlock()
	if list, ok := c.all[key]; ok {
		return list
	}
	if c.all == nil || len(c.all) >= maxOffers {
		c.all = map[[sha256.Size]byte][]KindOffer{}
	}
	list := readOffers(infos)
	c.all[key] = list
	return list
}

func readOffers(infos []*agentpb.KindInfo) []KindOffer {
	list := make([]KindOffer, 0, min(len(infos), maxKinds))
	for _, k := range infos[:min(len(infos), maxKinds)] {
		offer := KindOffer{Name: clean(k.GetName(), maxName)}
		for _, p := range k.GetPrograms()[:min(len(k.GetPrograms()), maxPrograms)] {
			program := Program{Name: clean(p.GetName(), maxName), Description: clean(p.GetDescription(), maxSentence)}
			if schema := p.GetParamsSchema(); checkedJSON(schema) {
				program.ParamsSchema = json.RawMessage(schema)
			}
			offer.Programs = append(offer.Programs, program)
		}
		list = append(list, offer)
	}
	return list
}
