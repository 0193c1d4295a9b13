package controller

import (
	"fmt"
	"strings"
)

// Reload takes a configuration that was read anew and applies what can change
// while the controller runs: the limits of the public port and their mode. It
// logs what has changed and which changes wait for a restart. On an error
// nothing has changed. One Reload at a time.
func (c *Controller) Reload(next Config) error {
	defer c.herald.reloading()()
	var applied, waiting []string
	for _, k := range Keys() {
		was, is := k.get(c.loaded), k.get(next)
		switch {
		case was == is:
		case k.Live:
			applied = append(applied, fmt.Sprintf("%s: %s -> %s", k.Name, was, is))
		case k.Name == "database-url" || k.Name == "database-direct-url": // may hold a password
			waiting = append(waiting, k.Name)
		default:
			waiting = append(waiting, fmt.Sprintf("%s: %s -> %s", k.Name, was, is))
		}
	}
	if len(applied) > 0 {
		if err := c.listener.UpdateLimits(next.Listening.Limits); err != nil {
			return fmt.Errorf("settings not reloaded, nothing has changed: %w", err)
		}
	}
	c.loaded.Listening.Limits = next.Listening.Limits
	c.log.Info("settings reloaded", "changed", said(applied))
	if len(waiting) > 0 {
		c.log.Warn("some changed settings take effect at the next start only", "settings", said(waiting))
	}
	return nil
}

func said(list []string) string {
	if len(list) == 0 {
		return "nothing"
	}
	return strings.Join(list, "; ")
}
