// Package converge brings the machine to its NodeSpec, section by section in
// a fixed order, and says how far it got.
package converge
