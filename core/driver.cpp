// Two schedules, one arithmetic. With enough items for the threads, a thread folds an item's key blocks one after the
// other. With few, or where partial results are small (decoding), every block has a partial result of its own, made by
// whichever thread is free, and each item's are then folded in the same order: the schedule changes, the bits do not.
#include "driver.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "parallel.h"

namespace softlookup {
namespace {

constexpr int64_t most_rows = 768;  // a packed block of keys serves this many rows: packing costs a few percent
constexpr int64_t least_rows = 96;  // below, packing would show
constexpr int64_t items_a_thread = 4;
constexpr int64_t most_partial_bytes = 4 << 20;  // of partial results at a time, unless the threads need more
constexpr int64_t most_task_blocks = 8;
constexpr int64_t least_bytes_to_share = 1 << 17;  // fewer are folded before another thread has heard of them

// A thread has to be waited for, and woken if it sleeps: each is given no less work than this, in products. Reading a
// number of K or V counts as some products of it.
constexpr double least_products = 1 << 17;
constexpr double least_products_to_wake = 1 << 22;
constexpr int64_t products_a_read = 4;

// Memory that a thread keeps between calls.
struct Arena {
  char* memory = nullptr;
  int64_t capacity = 0;
  bool lent = false;

  Arena() = default;
  ~Arena() { std::free(memory); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
};
thread_local Arena scratch_arena;
thread_local Arena state_arena;

// The arena's memory for as long as this lives. A predicate may call the library again on the same thread: the inner
// call finds the arena lent and gets memory of its own.
class Lease {
 public:
  Lease(Arena& arena, int64_t bytes) : arena_(arena), own_(arena.lent) {
    const int64_t rounded = (std::max<int64_t>(bytes, 1) + 4095) / 4096 * 4096;
    if (own_) {
      memory_ = allocate(rounded);
      return;
    }
    if (rounded > arena.capacity) {
      std::free(arena.memory);
      arena.memory = allocate(rounded);
      arena.capacity = arena.memory ? rounded : 0;
    }
    arena.lent = true;
    memory_ = arena.memory;
  }
  ~Lease() {
    if (own_) {
      std::free(memory_);
    } else {
      arena_.lent = false;
    }
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  char* memory() const { return memory_; }  // null where there is none

 private:
  static char* allocate(int64_t bytes) {
    return static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(bytes)));
  }

  Arena& arena_;
  bool own_;
  char* memory_ = nullptr;
};

bool is_empty(const Problem& problem) {
  return problem.batch == 0 || problem.query_heads == 0 || problem.output_rows == 0;
}

// How many of the threads have enough to do, whatever the mask hides. The schedule never shows in the bits.
int useful_threads(const Problem& problem, int threads) {
  const double numbers = static_cast<double>(problem.batch) * static_cast<double>(problem.key_heads) *
                         static_cast<double>(problem.keys) * static_cast<double>(problem.width + problem.value_width);
  const int64_t group = problem.query_heads / problem.key_heads;
  const double products = numbers * static_cast<double>(products_a_read + group * problem.output_rows);
  if (threads == 1 || products < 2 * least_products) return 1;
  const double least = team_is_awake() ? least_products : least_products_to_wake;
  return static_cast<int>(std::clamp(products / least, 1.0, static_cast<double>(threads)));
}

struct Plan {
  const Problem& problem;
  const Arithmetic& kernels;
  int threads;
  int64_t tile_queries = 1;  // queries of an item
  int64_t tiles = 0;
  int64_t items = 0;
  int64_t scratch_bytes = 0;
  int64_t state_bytes = 0;
  std::atomic<bool> out_of_memory{false};

  Plan(const Problem& problem_, const Arithmetic& kernels_, int threads_)
      : problem(problem_), kernels(kernels_), threads(useful_threads(problem_, threads_)) {
    const int64_t group = problem.query_heads / problem.key_heads;
    const int64_t heads = problem.batch * problem.key_heads;
    int64_t rows = most_rows;
    while (rows > least_rows && count_tiles(rows, group) * heads < items_a_thread * threads) rows /= 2;
    tile_queries = std::max<int64_t>(1, rows / group);
    tiles = count_tiles(rows, group);
    items = heads * tiles;
    const int64_t item_rows = std::min(tile_queries, problem.output_rows) * group;
    scratch_bytes = kernels.scratch_bytes(problem, item_rows);
    state_bytes = kernels.state_bytes(problem, item_rows);
  }

  int64_t count_tiles(int64_t rows, int64_t group) const {
    const int64_t queries = std::max<int64_t>(1, rows / group);
    return (problem.output_rows + queries - 1) / queries;
  }

  // The last queries first: under a causal mask they cost most, and long items at the end would leave threads idle.
  Item item(int64_t index) const {
    const int64_t heads = problem.batch * problem.key_heads;
    const int64_t first = (tiles - 1 - index / heads) * tile_queries;
    const int64_t head = index % heads;
    return {head / problem.key_heads, head % problem.key_heads, first,
            std::min(tile_queries, problem.output_rows - first)};
  }
};

// Calls function(index, scratch) on the threads.
template <class Function>
void for_each(int64_t count, int threads, int64_t scratch_bytes, std::atomic<bool>& out_of_memory, Function function) {
  const auto body = [&](int64_t index) {
    const Lease scratch(scratch_arena, scratch_bytes);
    if (scratch.memory()) {
      function(index, scratch.memory());
    } else {
      out_of_memory.store(true);
    }
  };
  using Body = decltype(body);
  parallel_for(
      count, threads, [](void* context, int64_t index) { (*static_cast<Body*>(context))(index); },
      const_cast<void*>(static_cast<const void*>(&body)));
  if (out_of_memory.load()) throw std::bad_alloc();
}
template <class Function>
void for_each(Plan& plan, int64_t count, Function function) {
  for_each(count, plan.threads, plan.scratch_bytes, plan.out_of_memory, function);
}

void attend_items(Plan& plan) {
  for_each(plan, plan.items, [&plan](int64_t index, char* scratch) {
    const Lease state(state_arena, plan.state_bytes);
    if (!state.memory()) {
      plan.out_of_memory.store(true);
      return;
    }
    const Item item = plan.item(index);
    plan.kernels.reset(plan.problem, item, state.memory());
    plan.kernels.attend(plan.problem, item, plan.kernels.visible_blocks(plan.problem, item), state.memory(), 0,
                        scratch);
    plan.kernels.finish(plan.problem, item, state.memory(), scratch);
  });
}

// Successive blocks of one item, and the slot of the first one's partial result.
struct Task {
  int64_t item;
  BlockRange blocks;
  int64_t slot;
};

bool has_page(const Problem& problem, int64_t batch, int64_t block) {
  const Pages& pages = problem.pages;
  return !pages.table || (block < pages.blocks && pages.table[batch * pages.blocks + block]);
}

// The blocks of all items in their order, at most `most` to a task; what a cache does not hold is left out.
std::vector<Task> tasks_of(const Plan& plan, int64_t most) {
  std::vector<Task> tasks;
  int64_t slot = 0;
  for (int64_t index = 0; index < plan.items; ++index) {
    const Item item = plan.item(index);
    const BlockRange visible = plan.kernels.visible_blocks(plan.problem, item);
    for (int64_t block = visible.first; block < visible.last; ++block) {
      if (!has_page(plan.problem, item.batch, block)) continue;
      const bool goes_on = !tasks.empty() && tasks.back().item == index && tasks.back().blocks.last == block;
      if (goes_on && block - tasks.back().blocks.first < most) {
        ++tasks.back().blocks.last;
      } else {
        tasks.push_back({index, {block, block + 1}, slot});
      }
      ++slot;
    }
  }
  return tasks;
}

int64_t slots_before(const std::vector<Task>& tasks, size_t index) {
  if (index == 0) return 0;
  const Task& last = tasks[index - 1];
  return last.slot + last.blocks.last - last.blocks.first;
}

// As many tasks at a time as there is room for their partial results.
void attend_split(Plan& plan, const std::vector<Task>& tasks, int64_t slots) {
  const Problem& problem = plan.problem;
  const Lease lease(state_arena, plan.state_bytes * (plan.items + slots));
  if (!lease.memory()) throw std::bad_alloc();
  char* const partials = lease.memory() + plan.items * plan.state_bytes;
  const auto state_of = [&](int64_t item) { return lease.memory() + item * plan.state_bytes; };
  for (int64_t index = 0; index < plan.items; ++index) plan.kernels.reset(problem, plan.item(index), state_of(index));

  // Once even where nothing is visible: rows are finished after their last task.
  size_t first = 0;
  do {
    const int64_t first_slot = tasks.empty() ? 0 : tasks[first].slot;
    size_t last = std::min(first + 1, tasks.size());
    while (last < tasks.size() && slots_before(tasks, last + 1) - first_slot <= slots) ++last;
    const auto partial_of = [&](int64_t slot) { return partials + (slot - first_slot) * plan.state_bytes; };
    for_each(plan, static_cast<int64_t>(last - first), [&](int64_t index, char* scratch) {
      const Task& task = tasks[first + static_cast<size_t>(index)];
      plan.kernels.attend(problem, plan.item(task.item), task.blocks, partial_of(task.slot), plan.state_bytes, scratch);
    });
    const auto fold_item = [&](int64_t item) {
      const auto before = [](const Task& task, int64_t wanted) { return task.item < wanted; };
      const auto end = tasks.begin() + static_cast<std::ptrdiff_t>(last);
      auto task = std::lower_bound(tasks.begin() + static_cast<std::ptrdiff_t>(first), end, item, before);
      for (; task != end && task->item == item; ++task) {
        for (int64_t place = 0; place < task->blocks.last - task->blocks.first; ++place) {
          plan.kernels.fold(problem, plan.item(item), state_of(item), partial_of(task->slot + place));
        }
      }
    };
    const bool is_last = last == tasks.size();
    const int64_t bytes = (slots_before(tasks, last) - first_slot) * plan.state_bytes;
    const int team = bytes < least_bytes_to_share ? 1 : plan.threads;
    for_each(plan.items, team, plan.scratch_bytes, plan.out_of_memory, [&](int64_t item, char* scratch) {
      fold_item(item);
      if (is_last) plan.kernels.finish(problem, plan.item(item), state_of(item), scratch);
    });
    first = last;
  } while (first < tasks.size());
}

}  // namespace

void attend(const Problem& problem, const Arithmetic& arithmetic, int threads) {
  if (is_empty(problem)) return;
  Plan plan(problem, arithmetic, threads);
  const int64_t blocks = (problem.keys + block_keys - 1) / block_keys + 1;
  const bool small = plan.items * blocks * plan.state_bytes <= most_partial_bytes;
  if (plan.threads == 1 || problem.keys <= block_keys || (plan.items >= items_a_thread * plan.threads && !small)) {
    attend_items(plan);
    return;
  }
  const int64_t tasks_wanted = 2 * items_a_thread * plan.threads;
  const int64_t slots = std::max(tasks_wanted, most_partial_bytes / plan.state_bytes);
  const int64_t at_most = std::clamp<int64_t>(plan.items * (blocks - 1) / (2 * tasks_wanted), 1, most_task_blocks);
  attend_split(plan, tasks_of(plan, at_most), slots);
}

void scores(const Problem& problem, const Arithmetic& arithmetic, int threads) {
  if (is_empty(problem) || problem.keys == 0) return;
  Plan plan(problem, arithmetic, threads);
  const BlockRange blocks = {block_of(problem.key_start), block_of(problem.key_start + problem.keys - 1) + 1};
  for_each(plan, plan.items,
           [&](int64_t index, char* scratch) { plan.kernels.scores(problem, plan.item(index), blocks, scratch); });
}

void differentiate(const Problem& problem, Gradients gradients, const Arithmetic& arithmetic, int threads) {
  if (is_empty(problem) || problem.keys == 0) return;
  threads = useful_threads(problem, threads);
  const int64_t heads = problem.batch * problem.key_heads;
  const int64_t tile_queries = arithmetic.gradient_queries(problem);
  const int64_t tiles = (problem.queries + tile_queries - 1) / tile_queries;
  const int64_t rows = problem.batch * problem.query_heads * problem.queries;
  const int64_t sum_bytes = (rows * arithmetic.query_sum_bytes(problem) + 63) / 64 * 64;
  const Lease lease(state_arena, sum_bytes + heads * tiles * static_cast<int64_t>(sizeof(int64_t)));
  if (!lease.memory()) throw std::bad_alloc();
  gradients.query_sums = lease.memory();
  gradients.turns = reinterpret_cast<int64_t*>(lease.memory() + sum_bytes);
  std::memset(gradients.query_sums, 0, static_cast<size_t>(sum_bytes));

  std::atomic<bool> out_of_memory{false};
  gradients.wait = [](void* context) {
    std::this_thread::yield();
    return !static_cast<std::atomic<bool>*>(context)->load();
  };
  gradients.wait_context = &out_of_memory;
  const int64_t scratch_bytes = arithmetic.gradient_scratch_bytes(problem);
  const auto item_of = [&](int64_t head, int64_t first_query) {
    return Item{head / problem.key_heads, head % problem.key_heads, first_query,
                std::min(tile_queries, problem.queries - first_query)};
  };
  for_each(heads * tiles, threads, scratch_bytes, out_of_memory, [&](int64_t index, char* scratch) {
    arithmetic.start_gradients(problem, gradients, item_of(index / tiles, index % tiles * tile_queries), scratch);
  });

  // The gradients of sinks, and of a bias that is one number a row, are made of delta alone.
  if (!gradients.query.data && !gradients.key.data && !gradients.value.data && !gradients.bias.data) return;

  const int64_t first_block = block_of(problem.key_start);
  const int64_t blocks = block_of(problem.key_start + problem.keys - 1) + 1 - first_block;
  // Blocks start in ascending order, so whoever waits for a turn waits for somebody who is running. A bias gradient
  // that several heads add to is kept in order by giving all heads of a block to one thread.
  const int64_t together = gradients.bias.data && gradients.bias_is_shared ? heads : 1;
  for_each(blocks * heads / together, threads, scratch_bytes, out_of_memory, [&](int64_t index, char* scratch) {
    for (int64_t place = index * together; place < (index + 1) * together; ++place) {
      const int64_t head = place % heads;
      arithmetic.differentiate(problem, gradients, head / problem.key_heads, head % problem.key_heads,
                               first_block + place / heads, scratch);
    }
  });
}

}  // namespace softlookup
