#pragma once

namespace ebb::graphs {

// Empties the autograd engine's queue of this thread. When backward fails, the nodes that were ready by then stay in
// the queue of the thread that called it, each with the graph behind it and all that this saved, until that thread goes
// backward the next time (`Engine::thread_main` in torch/csrc/autograd/engine.cpp leaves its loop as soon as there is
// an error). This is that next time, over a graph of one node.
void empty_ready_queue();

}  // namespace ebb::graphs
